"""Programs of one forbidden call each, for x86-64 and arm: what the kernel must refuse a program in the sandbox."""

from __future__ import annotations

SYSTEM_CALL = """
import ctypes, os, platform
call = ctypes.CDLL(None, use_errno=True).syscall
number = {x86}if platform.machine() == "x86_64" else {arm}
ctypes.set_errno(0)
result = call(number, {arguments})
print("made" if result >= 0 else os.strerror(ctypes.get_errno()))
"""


def system_call(x86: int, arm: int, arguments: str) -> str:
    return SYSTEM_CALL.format(x86=f"{x86} ", arm=arm, arguments=arguments)


REFUSED = {
    "memfd": system_call(319, 279, "b'x', 0"),
    "secret memory": system_call(447, 447, "0"),
    "system V segment": system_call(29, 194, "0, 1 << 28, 0o1666"),
    "system V queue": system_call(68, 186, "0, 0o1666"),
    "message queue": system_call(240, 180, "b'/x', 0o102, 0o600, 0"),
    "keyring": system_call(248, 217, "b'user', b'x', b'y', 1, -3"),
    "namespace": system_call(272, 97, "0x10000000"),
    "namespace by clone": system_call(56, 220, "0x10000000 | 17, 0, 0, 0, 0"),
    "mount": system_call(165, 40, "b'x', b'/tmp', b'tmpfs', 0, 0"),
    "new mount": system_call(430, 430, "b'tmpfs', 0"),
    "io_uring": system_call(425, 425, "8, ctypes.create_string_buffer(256)"),
    "bpf": system_call(321, 280, "0, 0, 0"),
    "perf": system_call(298, 241, "ctypes.create_string_buffer(128), 0, -1, -1, 0"),
    "userfaultfd": system_call(323, 282, "0"),
    "handles": system_call(304, 265, "-100, 0, 0"),
    "chroot": "import os\nos.chroot('/tmp')",
    "device": "import os, stat\nos.mknod('/tmp/disk', stat.S_IFBLK | 0o666, os.makedev(254, 0))",
    "become root": "import os\nos.setuid(0)",
    "higher limits": "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (4096, 4096))",
    "kernel settings": "open('/proc/sys/kernel/core_pattern', 'w').write('|/tmp/x')",
    "namespaces' settings": "open('/proc/sys/user/max_user_namespaces', 'w').write('100')",
    "sysrq": "open('/proc/sysrq-trigger', 'w').write('b')",
    "programs": "open('/usr/bin/python3', 'ab').write(b'x')",
    "root directory": "open('/x', 'w')",
    "own script": "open('/main', 'w')",
    "other root": "import os\nprint(open('/proc/1/root/etc/shadow').read())",
    "link to the host": "import os\nos.symlink('/proc/1/cwd/../../etc/passwd', '/tmp/l')\nprint(open('/tmp/l').read())",
}
