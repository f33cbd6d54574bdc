"""Serve one verifier over HTTP: `make serve-env NAME=mcqa`, or `python -m tools.environments.serve_env --name mcqa`.

A run uses this server when its configuration has `env.nemo_gym.mcqa.resources_servers.mcqa.url: http://HOST:PORT`. A
verifier with a judge is told where that is: `--judge-url http://HOST:PORT/v1 --judge-model NAME`.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from recipes.cluster.ports import family_of, host_port, url_of
from recipes.environments.contract import OWN, PUBLISHED, Verifier, keys_of
from recipes.environments.instances import ALL_VERIFIERS, GROUP_VERIFIERS, servers_of
from recipes.errors import LaunchError, Problem, suggestion
from tools.command_line import exit_status, setting, tcp_port


@exit_status
def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until interrupted; returns 2 for a wrong argument."""
    parser = argparse.ArgumentParser(prog="serve_env", description=__doc__)
    parser.add_argument("--name", required=True, help=f"verifier: {', '.join(ALL_VERIFIERS)}")
    parser.add_argument(
        "--instance", help="name of the server instance, in its session cookie; default: the verifier's"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=tcp_port, default=5000, help="TCP port; 0 takes any free one")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the verifier")
    parser.add_argument("--judge-url", default="", help="address of its judge's API, up to and with /v1")
    parser.add_argument("--judge-model", default="judge", help="name of the judge's model")
    parser.add_argument(
        "--judge-texts", choices=(PUBLISHED, OWN), default=PUBLISHED, help="words that it is asked in (env.judge_texts)"
    )
    options = parser.parse_args(arguments)
    with _listen(options.host, options.port) as listener:
        _serve(options, listener)
    return 0


def _serve(options: argparse.Namespace, listener: socket.socket) -> None:
    if options.name not in ALL_VERIFIERS:
        wrong, fix = f"there is no verifier '{options.name}'", suggestion(options.name, ALL_VERIFIERS)
        raise LaunchError(Problem(where="--name", wrong=wrong, fix=fix))
    name, verifier = options.instance or options.name, ALL_VERIFIERS[options.name]
    settings = dict(setting(text) for text in options.set)
    instances = _instances(options, name, settings)
    instance = servers_of(instances)[name]
    if isinstance(verifier, Verifier) and (tools := verifier.tools) is not None:
        try:
            tools.start(instance.settings)
        except ValueError as error:
            fix = "correct the setting, or get what is missing"
            raise LaunchError(Problem(where=name, wrong=str(error), fix=fix)) from error
    if verifier.needs_judge(instance.settings) and instance.judge is None:
        wrong = f"it asks a judge with these settings, and a server of {options.name} alone has none"
        raise LaunchError(
            Problem(where=name, wrong=wrong, fix="give --judge-url http://HOST:PORT/v1 and --judge-model")
        )
    instance = servers_of(instances, judge_texts=options.judge_texts)[name]

    import uvicorn

    from recipes.cluster.http_limits import LimitedProtocol
    from recipes.environments.server.resources import create_app

    host, port = listener.getsockname()[:2]
    print(f"{options.name} listens on {url_of(host, port)}", flush=True)
    config = uvicorn.Config(create_app(instance), http=LimitedProtocol, log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listener])


def _instances(options: argparse.Namespace, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the server, and its judge if it is given one, as the configuration has them."""
    if not options.judge_url:
        return {name: {"resources_servers": {options.name: settings}}}
    own = GROUP_VERIFIERS.get(options.name)
    key = f"{own.judge if own else 'judge'}_model_server"
    named = {key: {"name": "its_judge"}} if key in keys_of(ALL_VERIFIERS[options.name].settings) else {}
    judge = {"base_url": options.judge_url, "model": options.judge_model}
    return {
        name: {"resources_servers": {options.name: {**named, **settings}}},
        "its_judge": {"responses_api_models": {"vllm_model": judge}},
    }


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=family_of(host), backlog=1024)
    except OSError as error:
        wrong = f"cannot listen there: {error.strerror or error}"
        raise LaunchError(Problem(where=host_port(host, port), wrong=wrong, fix="set --port to a free port")) from error


if __name__ == "__main__":
    sys.exit(main())
