"""Let OpenHands 0.62 work on one task, as `agents/coding/programs.py` says. It runs in that program's environment.

OpenHands' own loop, agent (CodeActAgent) and editor, with the task's container as its runtime. The editor works on
copies of the container's files, and what it writes is written back. Parts of OpenHands that this does not use
(browsers, other agents, other runtimes, MCP) need packages that are not installed; empty modules take their places.

This is the release of the package index. The fork that the published stage pins, `agent_framework_repo` at
`agent_framework_commit`, asks its model through NeMo Gym's own client, so only NeMo RL's engine starts it.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.abc
import importlib.machinery
import json
import os
import posixpath
import shlex
import shutil
import socket
import sys
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

TASK = """The repository in {workspace} has a fault. Change its source so that what follows holds, but no test.

{problem}

Nobody answers questions. When the work is done, call the tool that finishes."""
NOT_INSTALLED = ("browsergym", "dirhash", "docx", "fastapi", "pylatexenc")
NOT_USED = ("openhands.mcp", "openhands.runtime.impl.kubernetes.kubernetes_runtime")
# What its last error holds -> the end of the work.
ENDS = {
    "ContextWindow": "context_window",
    "maximum iteration": "max_iteration",
    "NotFoundError": "max_iteration",  # the model server takes no more calls
    "AgentStuckInLoopError": "stuck_in_loop",
}
PIECE = 60_000  # bytes of a file in one request
MAX_FILE_BYTES = 4 << 20
MAX_ENTRIES = 2000  # of a directory that is shown


class Absent(types.ModuleType):
    """A module of which every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **settings: None, "action_set": {}})


class NotInstalled(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of `NOT_INSTALLED`."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname.partition(".")[0] in NOT_INSTALLED:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class ContainerSocket:
    """The container of the task, over a socket."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self._stream = socket.socket(fileno=task["container"]).makefile("rw", encoding="utf-8", newline="\n")
        self._seconds = float(task["command_seconds"])

    def run(self, command: str, *, seconds: float | None = None, is_lasting: bool = False) -> tuple[int | None, str]:
        """Return the status of a command, None for a late one, and its output."""
        asked = {"command": command, "seconds": min(seconds or self._seconds, self._seconds), "lasting": is_lasting}
        self._stream.write(json.dumps(asked) + "\n")
        self._stream.flush()
        reply = json.loads(self._stream.readline() or '{"ended": "died"}')
        if "ended" in reply:
            sys.stderr.write(f"the container ended: {reply['ended']}\n")
            sys.stderr.flush()
            os._exit(3)
        return reply["status"], reply["output"]


class Files:
    """Copies of the container's files, in a directory of this machine, for an editor that works on local files."""

    def __init__(self, container: ContainerSocket, copies: Path) -> None:
        self._container, self.copies = container, copies

    def local(self, path: str) -> Path:
        """Return where the copy of an absolute path is: always below the directory of copies."""
        return self.copies / posixpath.normpath(f"/{path}").lstrip("/")

    def fetch(self, path: str) -> str:
        """Make the copy what the container has; return why that cannot be done, empty where it was."""
        copy, word = self.local(path), shlex.quote(path)
        shutil.rmtree(copy, ignore_errors=True)
        copy.unlink(missing_ok=True)
        ask = f"if [ -d {word} ]; then echo d; elif [ -f {word} ]; then wc -c <{word}; elif [ -e {word} ]; then echo o;"
        ask += f" elif [ -d {shlex.quote(posixpath.dirname(path))} ]; then echo n; fi"
        kind = self._container.run(ask)[1].strip()
        if kind == "n":
            copy.parent.mkdir(parents=True, exist_ok=True)
            return ""
        if kind == "d":
            return self._fetch_names(path, copy)
        if kind.isascii() and kind.isdigit() and int(kind) <= MAX_FILE_BYTES:
            content = bytearray()
            for start in range(1, int(kind) + 1, PIECE):
                status, said = self._container.run(f"tail -c +{start} {word} | head -c {PIECE} | base64 -w 0")
                if status != 0:
                    return f"{path} cannot be read: {said}"
                content += base64.b64decode(said)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)
        elif kind:
            return f"{path} is not a file of at most {MAX_FILE_BYTES} bytes"
        return ""

    def _fetch_names(self, path: str, copy: Path) -> str:
        """Copy the names of a directory's files, two levels deep."""
        copy.mkdir(parents=True, exist_ok=True)
        for kind in ("d", "f"):
            find = f"cd {shlex.quote(path)} && find -L . -maxdepth 2 -type {kind} | head -n {MAX_ENTRIES}"
            for name in self._container.run(find)[1].split("\n"):
                place = self.local(posixpath.join(path, name))
                with suppress(OSError):  # a name of two lines
                    place.mkdir(parents=True, exist_ok=True) if kind == "d" else place.touch()
        return ""

    def store(self, path: str) -> str:
        """Write the copy into the container; return why that cannot be done, empty where it was."""
        content, word = self.local(path).read_bytes(), shlex.quote(path)
        steps = [f"mkdir -p -- {shlex.quote(posixpath.dirname(path))} && : >{word}"]
        for start in range(0, len(content), PIECE):
            text = base64.b64encode(content[start : start + PIECE]).decode()
            steps.append(f"echo {text} | base64 -d >>{word}")
        for step in steps:
            status, said = self._container.run(step)
            if status != 0:
                return f"{path} cannot be written: {said}"
        return ""

    def edit(self, editor: Any, command: str, path: str, **arguments: Any) -> str:
        """Let the editor do one command; return what it says, with the paths of the container."""
        from openhands_aci.editor.exceptions import ToolError

        try:
            return self._edit(editor, command, path, arguments).replace(str(self.copies), "")
        except ToolError as error:
            return f"ERROR:\n{error.message}".replace(str(self.copies), "")
        except (OSError, ValueError) as error:  # a name that is too long, or not one
            return f"ERROR:\n{error}".replace(str(self.copies), "")

    def _edit(self, editor: Any, command: str, path: str, arguments: Mapping[str, Any]) -> str:
        if not path.startswith("/"):
            return str(editor(command=command, path=path, **arguments).error)
        if wrong := self.fetch(path):
            return f"ERROR:\n{wrong}"
        copy = self.local(path)
        before = copy.read_bytes() if copy.is_file() else None
        result = editor(command=command, path=str(copy), **arguments)
        if copy.is_file() and copy.read_bytes() != before and (wrong := self.store(path)):
            return f"ERROR:\n{wrong}"
        return f"ERROR:\n{result.error}" if result.error else str(result.output or "")


class ActionsInContainer:
    """The runtime's part of OpenHands: every action of the agent, in the task's container."""

    def use(self, container: ContainerSocket, files: Files, workspace: str) -> None:
        """Work in this container; called before the first action."""
        from openhands_aci.editor.editor import OHEditor

        self._container, self._files = container, files
        self._editor = OHEditor(workspace_root=str(files.local(workspace)))
        self._runtime_initialized = True

    def run(self, action: Any) -> Any:
        from openhands.events.observation import CmdOutputObservation, ErrorObservation
        from openhands.events.observation.commands import CmdOutputMetadata

        if action.is_input:
            return ErrorObservation("No command is running that could be given input.")
        status, output = self._container.run(action.command, seconds=action.timeout, is_lasting=True)
        directory = self._container.run("pwd", is_lasting=True)[1].strip()
        late = "" if status is not None else "\n[The command did not end in its time and was interrupted.]"
        code = -1 if status is None else status
        metadata = CmdOutputMetadata(exit_code=code, working_dir=directory, suffix=late)
        return CmdOutputObservation(content=output, command=action.command, metadata=metadata)

    def read(self, action: Any) -> Any:
        from openhands.events.observation import FileReadObservation

        said = self._files.edit(self._editor, "view", action.path, view_range=action.view_range)
        return FileReadObservation(content=said, path=action.path, impl_source=action.impl_source)

    def edit(self, action: Any) -> Any:
        from openhands.events.observation import FileEditObservation

        names = ("file_text", "old_str", "new_str", "insert_line")
        arguments = {name: getattr(action, name) for name in names}
        said = self._files.edit(self._editor, action.command, action.path, **arguments)
        texts = {"old_content": action.old_str, "new_content": action.new_str}
        return FileEditObservation(
            content=said, path=action.path, prev_exist=True, impl_source=action.impl_source, **texts
        )

    async def connect(self) -> None:
        pass

    def list_files(self, path: str | None = None) -> list[str]:
        return []

    def get_mcp_config(self, extra_stdio_servers: Any = None) -> Any:
        return self.config.mcp  # type: ignore[attr-defined]  # of OpenHands' Runtime

    async def call_tool_mcp(self, action: Any) -> Any:
        return self._refuse(action)

    def _refuse(self, *_arguments: Any, **_more: Any) -> Any:
        from openhands.events.observation import ErrorObservation

        return ErrorObservation("This tool does not work here.")

    run_ipython = write = browse = browse_interactive = copy_to = copy_from = _refuse


def configuration(task: Mapping[str, Any], place: Path) -> Any:
    """Return the configuration of OpenHands for a task."""
    from openhands.core.config import AgentConfig, LLMConfig, OpenHandsConfig, SandboxConfig
    from openhands.core.config.condenser_config import NoOpCondenserConfig

    server = task["model_server"]
    llm = LLMConfig(
        model=f"openai/{server['model']}",
        base_url=server["base_url"],
        api_key="of-the-path",
        custom_llm_provider="openai",
        native_tool_calling=True,
        caching_prompt=False,
        disable_vision=True,
        disable_stop_word=True,
        num_retries=2,
        retry_min_wait=1,
    )
    # The agent of the published stage: a shell, an editor, a place to think; no browser, no notebook.
    agent = AgentConfig(
        enable_browsing=False,
        enable_jupyter=False,
        enable_mcp=False,
        enable_plan_mode=False,
        enable_prompt_extensions=False,
        enable_history_truncation=False,
        condenser=NoOpCondenserConfig(),
    )
    return OpenHandsConfig(
        llms={"llm": llm},
        agents={"agent": agent, "CodeActAgent": agent},
        default_agent="CodeActAgent",
        runtime="cli",
        file_store="memory",
        cache_dir=str(place / "cache"),
        workspace_base=None,
        max_iterations=task["max_turns"],
        enable_browser=False,
        run_as_openhands=False,
        sandbox=SandboxConfig(timeout=int(task["command_seconds"])),
    )


async def work(task: Mapping[str, Any], place: Path) -> dict[str, str]:
    """Let the agent work, and return how that ended."""
    from openhands.core.main import auto_continue_response, run_controller
    from openhands.core.schema import AgentState
    from openhands.events import EventStream
    from openhands.events.action import MessageAction
    from openhands.memory.memory import Memory
    from openhands.runtime.base import Runtime
    from openhands.storage import get_file_store
    from openhands.utils.utils import create_registry_and_conversation_stats

    config, sid, container = configuration(task, place), "task", ContainerSocket(task)
    registry = create_registry_and_conversation_stats(config, sid, None)[0]
    stream = EventStream(sid, get_file_store("memory", str(place)))
    runtime_class: Any = type("ContainerRuntime", (ActionsInContainer, Runtime), {})
    runtime = runtime_class(config, stream, registry, sid=sid, headless_mode=True)
    runtime.use(container, Files(container, place / "copies"), task["workspace"])
    state = await run_controller(
        config,
        MessageAction(content=TASK.format(**task)),
        sid=sid,
        runtime=runtime,
        memory=Memory(stream, sid),
        fake_user_response_fn=auto_continue_response,
    )
    said = str(state.last_error or "") if state is not None else "it has no state"
    if state is not None and state.agent_state == AgentState.FINISHED:
        return {"end": "finished", "error": said}
    return {"end": next((end for words, end in ENDS.items() if words in said), "other"), "error": said[-2000:]}


def main() -> None:
    """Read the task, work, and print the result. Only from here is what this repository's own Python does not have."""
    task = json.load(sys.stdin)
    sys.meta_path.append(NotInstalled())
    import openhands

    # Its own `agenthub` imports every agent, and most of them need a browser.
    agents = types.ModuleType("openhands.agenthub")
    agents.__path__ = [str(Path(place) / "agenthub") for place in openhands.__path__]
    sys.modules["openhands.agenthub"] = agents
    sys.modules.update({name: Absent(name) for name in NOT_USED})
    import openhands.agenthub.codeact_agent  # it registers itself

    result = asyncio.run(work(task, Path.cwd()))
    sys.stdout.write(f"\n{json.dumps(result)}\n")
    sys.stdout.flush()
    os._exit(0)  # threads of OpenHands would be waited for


if __name__ == "__main__":
    main()
