"""Containers of tasks, for real: shells that live on, limits that hold, and nothing left afterwards."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from speed import patiently
from swe_containers_case import (
    LIMITS,
    ROOT,
    SECONDS,
    made,
    mounted_images,
    nothing_left,
    run,
    running,
    said,
    started,
    task_image,
    wait_until,
)

from recipes.environments.swe.containers.admission import Admission
from recipes.environments.swe.containers.places import PREFIX, clear_abandoned
from recipes.environments.swe.contract import (
    CommandResult,
    ContainerEnd,
    ContainerEndedError,
    ContainerFailedError,
    Runtime,
)

pytestmark = pytest.mark.functional
image = pytest.fixture(scope="module")(task_image)
nothing_is_left = pytest.fixture(autouse=True)(nothing_left)


@pytest.fixture(params=["bwrap", pytest.param("podman", marks=pytest.mark.slow)])
def runtime(request: pytest.FixtureRequest) -> Runtime:
    return made(request.param)


@pytest.fixture(params=["bwrap", "podman"])
def each(request: pytest.FixtureRequest) -> Runtime:
    """Each runtime, also where slow tests are left out: podman takes a second to start a container."""
    return made(request.param)


async def test_a_shell_keeps_its_state_and_its_output_in_order(runtime, image):
    async with started(runtime, image) as container:
        shell, other = await container.open_shell(), await container.open_shell()
        assert (
            await said(shell, 'pwd; echo "$OF_THE_IMAGE"; cd /testbed; f() { echo "f of $1"; }; a=(1 "2 3")')
            == "/\na b"
        )
        assert await said(shell, 'pwd; f x; echo "${a[1]}"; echo one; echo two >&2; echo three') == (
            "/testbed\nf of x\n2 3\none\ntwo\nthree"
        )
        assert await said(other, 'pwd; echo "$a"; touch /tmp/seen') == "/"
        assert await said(shell, "ls /tmp; cat; read x || echo end") == "seen\nend"  # a command has no input
        assert await run(shell, "cd /nowhere 2>/dev/null") == CommandResult(status=1, output="")
        assert (await run(shell, "if; then")).status == 2
        assert await said(shell, "printf 'a\\xff\\x00b'; (sleep 1000 &); echo ' !!'") == "a\ufffd\0b !!"
        await shell.enter("export entered=yes; cd /var", seconds=SECONDS)
        await said(shell, "cd '/usr/bin'; own=1")
        ended = await run(shell, "cd /; exit 7")
        assert ended.status == 7 and "ended with status 7; a new one" in ended.output
        assert await said(shell, 'echo "$PWD $entered $own"') == "/usr/bin yes"
        await run(shell, "mkdir /tmp/x; cd /tmp/x")
        await run(shell, "rmdir /tmp/x; kill -9 $$")
        assert await said(shell, 'echo "$PWD $entered"') == "/var yes"
        killed = await run(shell, "kill -9 -1; kill -9 $$")  # also the process that says how it ended
        assert killed.status == 137 and "ended with status 137; a new one" in killed.output
        assert await said(shell, 'echo "$entered"') == "yes"
        # A mark of its own, and another's words on every descriptor that it has:
        forged = await said(shell, "for n in 3 4 5 9; do echo ended 0 >&$n; done 2>/dev/null; sleep 0.2; echo real")
        assert forged == "real"


async def test_a_late_command_is_stopped_and_its_shell_goes_on(runtime, image):
    async with started(runtime, image) as container:
        shell = await container.open_shell()
        await said(shell, "cd /testbed; a=kept; sleep 555.5 & ")
        late = (
            "echo before; sleep 556.5; sleep 556.5",
            "while :; do :; done",
            "(trap '' INT; sleep 556.5); sleep 556.5",
            "(sleep 556.5 &) ; for i in 1 2 3; do sleep 556.5; done",
            "python3 -c 'import os, time; os.setsid(); os.fork(); time.sleep(556.5)'",
        )
        for command in late:
            result = await run(shell, command, seconds=0.5)
            assert result.status is None
            assert running("sleep 556.5") == [] and running("time.sleep(556.5)") == []
            assert await said(shell, 'echo "$PWD $a"') == "/testbed kept"
        assert len(running("sleep 555.5")) == 1
        stuck = await run(shell, "kill -STOP $$", seconds=0.5)
        assert stuck.status is None and "could not be interrupted; a new one" in stuck.output
        assert await said(shell, 'echo "$PWD $a"') == "/testbed"


async def test_a_flood_of_output_is_cut_in_the_middle(runtime, image):
    async with started(runtime, image) as container:
        shell = await container.open_shell()
        assert (await run(shell, "echo a; sh -c 'kill -9 $$'; echo b")).output == "a\nb\n"
        flood = await run(shell, "echo begin; head -c 20000000 /dev/zero | tr '\\0' x; echo; echo end", most=1000)
        assert flood.status == 0 and flood.num_dropped == 20_000_011 - 1000
        assert flood.output.startswith("begin\nxx") and flood.output.endswith("x\nend\n")
        assert f"\n[{flood.num_dropped} characters left out]\n" in flood.output and len(flood.output) < 1100
        endless = await run(shell, "yes", seconds=2, most=100)
        assert endless.status is None and endless.num_dropped > 1000
        assert await said(shell, "echo fine") == "fine"


async def test_files_go_in_and_out(runtime, image):
    async with started(runtime, image) as container:
        content = bytes(range(256)) * 8000
        await container.write_file("/new/a 'b\"/c", content)
        assert await container.read_file("/new/a 'b\"/c", max_bytes=10**8) == content
        assert await container.read_file("/new/a 'b\"/c", max_bytes=300) == content[:300]
        await container.write_file("/new/empty", b"")
        assert await container.read_file("/new/empty", max_bytes=10) == b""
        for path in ("/nowhere", "/new", "/dev/null", "a\0b"):
            with pytest.raises(FileNotFoundError):
                await container.read_file(path, max_bytes=10)
        with pytest.raises(OSError, match="was not written"):
            await container.write_file("/proc/new", b"x")
        with pytest.raises(OSError, match="was not written"):
            await container.write_file("/big", bytes(30 * 2**20))


HOST = r"""
exec 2>&1
echo "rights: $(grep -E '^(CapEff|CapBnd|NoNewPrivs):' /proc/self/status | tr -d '\n\t')"
echo "user: $(id -u)"
echo "outside: $(tr -s ' ' </proc/self/uid_map)"
for file in /proc/sys/kernel/core_pattern /proc/sys/vm/drop_caches /proc/sysrq-trigger /.shells/x /dev/x; do
  (echo 1 >"$file") 2>/dev/null && echo "written: $file"
done
mkdir -p /tmp/m && mount -t tmpfs tmpfs /tmp/m 2>/dev/null && echo mounted
unshare -Ur true 2>/dev/null && echo "made a namespace"
mknod /tmp/disk b 254 0 2>/dev/null && echo "made a device"
cat /proc/[0-9]*/environ | tr '\0' '\n' | grep -i canary
cat /proc/net/dev | grep -c : | sed 's/^/interfaces: /'
ls -d /home /work /opt /mnt /etc/shadow /dev/vda /dev/fuse /dev/kmsg 2>/dev/null
ls -A /dev/shm
"""


async def test_a_container_sees_nothing_of_this_machine(each, image, monkeypatch):
    monkeypatch.setenv("SECRET", "canary")
    with tempfile.NamedTemporaryFile(dir="/dev/shm"):
        async with started(each, image) as container:
            shell = await container.open_shell()
            lines = (await run(shell, HOST)).output.splitlines()
            processes = await said(shell, "ls /proc | grep -c '^[0-9]'")
            outside = Path(f"/proc/{container.init}/status").read_text(encoding="utf-8")
    assert lines[0] == "rights: CapEff:0000000000000000CapBnd:0000000000000000NoNewPrivs:1"
    assert lines[1] == "user: 0" and lines[2].split()[-1] == "1"
    # Podman's /dev can be written. It is in memory, and counts as the writable layer.
    assert lines[3:] == [*(["written: /dev/x"] if each.name == "podman" else []), "interfaces: 1"]
    assert int(processes) < 10
    if os.geteuid() == 0:
        assert re.search(r"^Uid:\s+65534\s+65534\s+65534\s+65534$", outside, re.MULTILINE), outside


async def test_what_a_container_writes_ends_with_it(runtime, image):
    async with started(runtime, image) as first, started(runtime, image) as second:
        await first.write_file("/testbed/new", b"x")
        shell = await second.open_shell()
        assert await said(shell, "ls /testbed; rm -r /usr/bin && mkdir /usr/bin && ls /usr/bin") == ""
        assert len(mounted_images()) == 1  # one mount for both
        assert (
            await said(await first.open_shell(), "ls /testbed /usr/bin/python3") == "/usr/bin/python3\n\n/testbed:\nnew"
        )
    async with started(runtime, image) as third:
        assert await said(await third.open_shell(), "ls /testbed") == ""


async def test_a_wrong_image_is_named(each, image, tmp_path):
    empty, cut = tmp_path / "empty.sif", tmp_path / "cut.sif"
    empty.write_bytes(b"x" * 5000)
    cut.write_bytes(Path(image).read_bytes()[:200_000])
    with pytest.raises(ContainerFailedError, match=r"empty\.sif is neither a SIF file nor"):
        await each.start(str(empty), LIMITS)
    with pytest.raises(ContainerFailedError, match=r"missing\.sif cannot be read"):
        await each.start(str(tmp_path / "missing.sif"), LIMITS)
    with pytest.raises(ContainerFailedError):
        await each.start(str(cut), LIMITS)


async def test_a_container_that_is_closed_or_killed_ends_what_runs_in_it(each, image):
    async with started(each, image) as closed, started(each, image) as killed, started(each, image) as third:
        commands = [
            asyncio.create_task(run(await container.open_shell(), "sleep 557.5")) for container in (closed, killed)
        ]
        assert await asyncio.to_thread(wait_until, lambda: len(running("sleep 557.5")) == 2)
        await closed.close()
        os.kill(killed.init, signal.SIGKILL)
        for command in commands:
            with pytest.raises(ContainerEndedError) as ended:
                await asyncio.wait_for(command, patiently(20))
            assert ended.value.end is ContainerEnd.DIED
        assert await asyncio.to_thread(wait_until, lambda: not running("sleep 557.5"))
        with pytest.raises(ContainerEndedError):
            await killed.open_shell()
        with pytest.raises(ContainerEndedError):
            await killed.read_file("/etc/passwd", max_bytes=10)
        assert await said(await third.open_shell(), "echo fine") == "fine"


HOGS = {
    "memory": "x = []\nwhile True: x.append(bytearray(2**24)); time.sleep(0.01)",
    "many": "[os.fork() for _ in range(3)]\nx = []\nwhile True: x.append(bytearray(2**22)); time.sleep(0.01)",
    "shared": (
        "for n in range(9): open(f'/dev/shm/{n}', 'wb').write(bytes(2**22))\n"
        "x = bytes(range(256)) * 2**21\ntime.sleep(60)"
    ),
}


@pytest.mark.parametrize("hog", HOGS)
async def test_a_container_that_takes_too_much_memory_ends_alone(runtime, image, hog):
    async with started(runtime, image) as greedy, started(runtime, image) as other:
        command = f"python3 -c {shlex.quote('import os, time' + chr(10) + HOGS[hog])}"
        with pytest.raises(ContainerEndedError) as ended:
            await run(await greedy.open_shell(), command)
        assert ended.value.end is ContainerEnd.MEMORY
        assert greedy.peak_memory_mib > LIMITS.memory_mib
        assert await said(await other.open_shell(), "echo fine") == "fine"
        assert 0 < other.peak_memory_mib < 100


async def test_memory_that_belongs_to_no_process_is_refused(runtime, image):
    async with started(runtime, image) as container:
        shell = await container.open_shell()
        refused = await run(shell, "python3 -c 'import os; os.memfd_create(str())'")
        assert refused.status == 1 and "PermissionError" in refused.output


async def test_a_limit_is_named_also_before_its_end_is_seen(each, image):
    async with started(each, image) as container:
        watched = container._state.watched
        watched.broken, watched.detail = ContainerEnd.DISK, "full"
        watched.kill()
        time.sleep(1.0)  # in which the event loop hears nothing of the end
        with pytest.raises(ContainerEndedError, match="full") as ended:
            await container.open_shell()
        assert ended.value.end is ContainerEnd.DISK


async def test_a_full_writable_layer_ends_its_container(each, image):
    async with started(each, image) as full, started(each, image) as other:
        shell = await full.open_shell()
        large = await run(shell, "head -c 40000000 /dev/zero >/tmp/large; stat -c %s /tmp/large")
        assert int(large.output.split()[-1]) == LIMITS.file_mib * 2**20  # one file has its own limit
        place = "/dev" if each.name == "podman" else "/testbed"
        fill = f"for n in 1 2 3 4 5 6 7 8 9; do head -c 9000000 /dev/zero >{place}/$n; done; sleep 60"
        with pytest.raises(ContainerEndedError) as ended:
            await run(shell, fill)
        assert ended.value.end is ContainerEnd.DISK
        assert await said(await other.open_shell(), "echo fine >/testbed/x; cat /testbed/x") == "fine"


async def test_a_fork_bomb_stays_in_its_container(each, image):
    async with started(each, image) as bomb, started(each, image) as other:
        shell = await bomb.open_shell()
        result = await run(shell, "f() { f | f & f; }; f", seconds=3)
        assert result.status is None and "Resource temporarily unavailable" in result.output
        assert await said(await other.open_shell(), "echo fine") == "fine"
        assert await said(shell, "echo again") == "again"


OWNER = """
import asyncio
from recipes.environments.swe.containers.places import home
from recipes.environments.swe.containers.runtime import RUNTIMES
from recipes.environments.swe.contract import ContainerLimits

async def main():
    container = await RUNTIMES[{name!r}][1]().start({image!r}, ContainerLimits(memory_mib=400))
    shell = await container.open_shell()
    running = asyncio.create_task(shell.run("trap '' TERM INT HUP; setsid sleep 558.5", seconds=600, max_characters=10))
    await (await container.open_shell()).run("until pidof sleep; do :; done", seconds=60, max_characters=10)
    print(home(), flush=True)
    await running

asyncio.run(main())
"""


async def test_nothing_runs_on_when_the_owner_is_killed(each, image):
    program = OWNER.format(image=image, name=each.name)
    owner = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        assert left.name.startswith(PREFIX) and running("sleep 558.5")
        owner.kill()
    assert wait_until(lambda: not running("sleep 558.5") and not running(str(left)))
    assert left.is_dir()
    clear_abandoned(left.parent)  # as the next start does
    assert not left.exists()


async def test_many_containers_at_once_share_a_mount_and_wait_for_places(runtime, image, tmp_path):
    admission, num_now, most = Admission(8, directory=tmp_path), 0, 0

    async def one(number: int) -> str:
        nonlocal num_now, most
        async with admission.reserve(seconds=patiently(120)), started(runtime, image) as container:
            num_now += 1
            most = max(most, num_now)
            assert len(mounted_images()) <= 1
            text = await said(await container.open_shell(), f"echo {number} >/testbed/n; cat /testbed/n")
            num_now -= 1
            return text

    assert await asyncio.gather(*(one(number) for number in range(32))) == [str(number) for number in range(32)]
    assert most <= 8
