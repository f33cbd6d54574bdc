"""The barrier of a job names what is missing, each node with the last line of its log."""

from __future__ import annotations

import signal
import socket
import time

import pytest

from tools.job import barrier, bring_up


@pytest.fixture
def logs(tmp_path, monkeypatch):
    (tmp_path / "nodes").write_text("localhost\nn2\nn3.domain\n")
    (tmp_path / "ray_head_localhost.log").write_text("starting\n  port 1200 is taken  \n\n")
    (tmp_path / "ray_worker_n2.log").write_text("")
    monkeypatch.setattr(barrier, "wait_for_port", lambda _address, _end: False)
    before = {number: signal.getsignal(number) for number in barrier.SIGNALS}
    yield tmp_path
    for number, handler in before.items():
        signal.signal(number, handler)


def test_missing_nodes_are_named_with_the_last_line_of_their_logs(logs, capsys):
    assert barrier.main([f"--nodes={logs}/nodes", "--units=8", "--deadline=0.01", "--", "true"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "barrier: localhost has no Ray head; ray_head_localhost.log: port 1200 is taken",
        "barrier: n2 is not in Ray; ray_worker_n2.log: empty",
        "barrier: n3.domain is not in Ray; ray_worker_n3.domain.log: no such file: the node has not started its part",
        "barrier: given up after 0.01 s",
    ]


def test_a_request_to_stop_before_the_driver_runs_ends_with_the_status_of_a_stop(logs, monkeypatch):
    monkeypatch.setattr(barrier, "wait_for_port", lambda _address, _end: signal.raise_signal(signal.SIGUSR1))
    with pytest.raises(SystemExit) as ended:
        barrier.main([f"--nodes={logs}/nodes", "--units=8", "--", "true"])
    assert ended.value.code == 75


def test_the_timeline_counts_from_the_start_of_the_job(tmp_path, monkeypatch):
    monkeypatch.setattr(bring_up.time, "time", lambda: 1012.34)
    timeline = bring_up.Timeline(job_start=1000.0)
    timeline.mark("the head listens")
    timeline.write(tmp_path / "bring_up.json")
    assert (tmp_path / "bring_up.json").read_text() == '{\n  "the head listens": 12.3\n}\n'


@pytest.mark.parametrize("fails", [0, 2])
def test_a_head_that_fails_after_it_listened_is_joined_once_it_is_there_again(fails, monkeypatch):
    tries = []

    def init(**_kwargs):
        tries.append(1)
        if len(tries) <= fails:
            raise ConnectionError("no GCS")

    monkeypatch.setattr("ray.init", init)
    with socket.create_server(("127.0.0.1", 0)) as head:
        assert barrier.join(f"127.0.0.1:{head.getsockname()[1]}", time.monotonic() + 60)
    assert len(tries) == fails + 1


def test_a_head_that_never_answers_is_given_up_at_the_deadline(monkeypatch):
    def init(**_kwargs):
        raise ConnectionError("no GCS")

    monkeypatch.setattr("ray.init", init)
    with socket.create_server(("127.0.0.1", 0)) as head:
        assert not barrier.join(f"127.0.0.1:{head.getsockname()[1]}", time.monotonic() + 0.6)


def test_a_node_whose_host_has_another_name_is_known_by_its_address(monkeypatch):
    addresses = {"gpu-1": "10.0.0.1", "gpu-2": "10.0.0.2", "gpu-3": "10.0.0.3"}
    asked = []
    monkeypatch.setattr(bring_up.socket, "gethostbyname", lambda name: asked.append(name) or addresses[name])
    monkeypatch.setattr(bring_up, "address_of", bring_up.address_of.__wrapped__)
    expected = list(addresses)
    assert bring_up.joined_names(expected, expected, {"gpu-1": "10.0.0.1"}) == ["gpu-1"]
    assert not asked
    hosts = {"gpu-1": "10.0.0.1", "ip-10-0-0-2": "10.0.0.2", "ip-10-0-0-9": "10.0.0.9"}
    assert bring_up.joined_names(expected, expected, hosts) == ["gpu-1", "gpu-2"]
