"""The barrier of a job names what is missing, each node with the last line of its log."""

from __future__ import annotations

import signal
import socket
import time

import pytest

from tools.job import barrier


@pytest.fixture
def logs(tmp_path, monkeypatch):
    (tmp_path / "nodes").write_text("localhost\nn2\nn3.domain\n", encoding="utf-8")
    (tmp_path / "ray_head_localhost.log").write_text("starting\n  port 1200 is taken  \n\n", encoding="utf-8")
    (tmp_path / "ray_worker_n2.log").write_text("", encoding="utf-8")
    monkeypatch.setattr(barrier, "wait_for_port", lambda _address, _may_wait: False)
    monkeypatch.setattr(barrier.time, "time", lambda: 1012.0)
    monkeypatch.setenv("SLURM_JOB_START_TIME", "1000")
    before = {number: signal.getsignal(number) for number in barrier.SIGNALS}
    yield tmp_path
    for number, handler in before.items():
        signal.signal(number, handler)


def test_missing_nodes_are_named_with_the_last_line_of_their_logs(logs, capsys):
    """Without the head no other node can join, so that it alone is to blame."""
    assert barrier.main([f"--nodes={logs}/nodes", "--units=8", "--deadline=0.01", "--", "true"]) == 69
    assert capsys.readouterr().err.splitlines() == [
        "barrier: localhost has no Ray head; ray_head_localhost.log: port 1200 is taken",
        "barrier: n2 is not in Ray; ray_worker_n2.log: empty",
        "barrier: n3.domain is not in Ray; ray_worker_n3.domain.log: no such file: the node has not started its part",
        "barrier: given up 12 s after the start of the job because of node localhost",
    ]


def nodes_of(tmp_path, *names, spares=0, seconds=60.0, grace=60.0):
    return barrier.Nodes(names, spares, tmp_path, time.monotonic() + seconds, grace_seconds=grace)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(barrier, "_NOTES_SECONDS", 0.0)
    monkeypatch.setattr(barrier, "_SETTLE_SECONDS", 0.05)


@pytest.mark.parametrize(
    ("spares", "joins", "unusable", "suffices", "blamed"),
    [
        (0, "abcd", "", True, ""),
        (0, "abc", "d", False, "d"),
        (1, "abc", "d", True, ""),
        (2, "ab", "cd", True, ""),
        (1, "ab", "cd", False, "cd"),
        (1, "b", "cd", False, "cd"),
        (3, "bcd", "a", False, "a"),  # the head has no spare
        (1, "", "bd", False, "bd"),
    ],
)
def test_a_node_that_says_it_cannot_be_used_is_not_waited_for(
    tmp_path, quick, monkeypatch, capsys, spares, joins, unusable, suffices, blamed
):
    (tmp_path / "nodes").touch()
    nodes = nodes_of(tmp_path, *"abcd", spares=spares)
    for name in unusable:
        monkeypatch.setenv("SLURMD_NODENAME", name)
        assert barrier.note_unusable(tmp_path, [f"{name}: 7 GPUs", "a port"])
    for name in joins:
        nodes.joined(name)
    began = time.monotonic()
    while nodes.wait_on():
        time.sleep(0.01)
    assert time.monotonic() - began < 30
    assert (nodes.suffice, "".join(nodes.blamed)) == (suffices, blamed)
    nodes.report()
    said = capsys.readouterr().err
    assert all(f"barrier: {name} cannot be used: {name}: 7 GPUs; a port" in said for name in unusable)


@pytest.mark.parametrize(("spares", "goes_on"), [(0, False), (1, True), (2, True)])
def test_late_nodes_get_a_grace_once_enough_are_there(tmp_path, quick, capsys, spares, goes_on):
    nodes = nodes_of(tmp_path, *"abcd", spares=spares, seconds=1.0, grace=0.1)
    began = time.monotonic()
    for name in "bca":
        nodes.joined(name)
    while nodes.wait_on():
        time.sleep(0.01)
    assert (time.monotonic() - began < 0.9) == goes_on
    assert (nodes.suffice, nodes.blamed) == (goes_on, [] if goes_on else ["d"])
    nodes.report()
    assert "d is not in Ray; ray_worker_d.log: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("has_head", "joins", "unusable", "blamed"),
    [
        (False, "", "", "a"),
        (False, "", "c", "ca"),
        (True, "", "", "abcd"),  # Ray answers on the head, and no node is in it: none is to blame
        (True, "bcd", "", "a"),  # with too few units
        (True, "acd", "", "b"),
    ],
)
def test_who_is_to_blame_when_the_time_is_over(tmp_path, quick, monkeypatch, has_head, joins, unusable, blamed):
    (tmp_path / "nodes").touch()
    nodes = nodes_of(tmp_path, *"abcd", spares=1 if unusable else 0, seconds=0.1)
    nodes.has_head = has_head
    for name in unusable:
        monkeypatch.setenv("SLURMD_NODENAME", name)
        assert barrier.note_unusable(tmp_path, ["7 GPUs"])
    for name in joins:
        nodes.joined(name)
    while nodes.wait_on():
        time.sleep(0.01)
    assert "".join(nodes.blamed) == blamed


def test_sandboxes_are_not_waited_for_when_the_job_cannot_go_on(logs, monkeypatch, capsys):
    monkeypatch.setattr(barrier, "wait_for_nodes", lambda _address, nodes, *_: nodes.joined("localhost"))
    monkeypatch.setattr(barrier, "sandbox_answers", lambda _host: False)
    began = time.monotonic()
    assert barrier.main([f"--nodes={logs}/nodes", "--units=8", "--sandboxes", "--deadline=60", "--", "true"]) == 69
    assert time.monotonic() - began < 30
    assert "because of node localhost" not in capsys.readouterr().err


def test_a_start_that_some_nodes_break_has_a_status_of_its_own():
    timeline = barrier.Timeline(job_start=time.time() - 12)
    assert barrier.give_up(["n1", "n2"], ["n2"], timeline) == 69
    assert barrier.give_up(["n1", "n2"], ["n1", "n2"], timeline) == 1


def test_a_request_to_stop_before_the_driver_runs_ends_with_the_status_of_a_stop(logs, monkeypatch):
    monkeypatch.setattr(barrier, "wait_for_port", lambda _address, _may_wait: signal.raise_signal(signal.SIGUSR1))
    with pytest.raises(SystemExit) as ended:
        barrier.main([f"--nodes={logs}/nodes", "--units=8", "--", "true"])
    assert ended.value.code == 75


def test_the_timeline_counts_from_the_start_of_the_job(tmp_path, monkeypatch):
    monkeypatch.setattr(barrier.time, "time", lambda: 1012.34)
    timeline = barrier.Timeline(job_start=1000.0)
    timeline.mark("the head listens")
    timeline.write(tmp_path / "bring_up.json")
    assert (tmp_path / "bring_up.json").read_text(encoding="utf-8") == '{\n  "the head listens": 12.3\n}\n'


@pytest.mark.parametrize("fails", [0, 2])
def test_a_head_that_fails_after_it_listened_is_joined_once_it_is_there_again(fails, monkeypatch):
    tries = []

    def init(**_kwargs):
        tries.append(1)
        if len(tries) <= fails:
            raise ConnectionError("no GCS")

    monkeypatch.setattr("ray.init", init)
    with socket.create_server(("127.0.0.1", 0)) as head:
        assert barrier.join(f"127.0.0.1:{head.getsockname()[1]}", lambda: True)
    assert len(tries) == fails + 1


def test_a_head_that_never_answers_is_given_up_at_the_deadline(monkeypatch):
    def init(**_kwargs):
        raise ConnectionError("no GCS")

    monkeypatch.setattr("ray.init", init)
    with socket.create_server(("127.0.0.1", 0)) as head:
        end = time.monotonic() + 0.6
        assert not barrier.join(f"127.0.0.1:{head.getsockname()[1]}", lambda: time.monotonic() < end)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("n001", "n001"),
        ("N7.Cluster.example.", "n7"),
        ("gpu_node-1.a", "gpu_node-1"),
        ("10.0.0.1", "10.0.0.1"),  # its first part would be that of every node
        ("fd00::2", "fd00::2"),
    ],
)
def test_a_host_is_known_by_its_name_without_the_domain(name, known):
    assert barrier.short(name) == known
    assert barrier.joined_names([name], [name, "other"], {known: "10.9.9.9"}) == [name]
    assert barrier.known_address("a" * 64) == ""


def test_the_sandbox_of_a_node_is_asked_on_ipv6(monkeypatch):
    asked = []

    class Direct:
        def open(self, url, timeout):
            asked.append((url, timeout))
            raise OSError

    monkeypatch.setattr(barrier.urllib.request, "build_opener", lambda *_: Direct())
    assert not barrier.sandbox_answers("fd00::2")
    assert asked == [("http://[fd00::2]:6000/health", 5.0)]


def test_a_node_whose_host_has_another_name_is_known_by_its_address(monkeypatch):
    addresses = {"gpu-1": "10.0.0.1", "gpu-2": "10.0.0.2", "gpu-3": "10.0.0.3"}
    asked = []
    monkeypatch.setattr(barrier, "address_of", lambda name: asked.append(name) or addresses[name])
    monkeypatch.setattr(barrier, "known_address", barrier.known_address.__wrapped__)
    expected = list(addresses)
    assert barrier.joined_names(expected, expected, {"gpu-1": "10.0.0.1"}) == ["gpu-1"]
    assert not asked
    hosts = {"gpu-1": "10.0.0.1", "ip-10-0-0-2": "10.0.0.2", "ip-10-0-0-9": "10.0.0.9"}
    assert barrier.joined_names(expected, expected, hosts) == ["gpu-1", "gpu-2"]
