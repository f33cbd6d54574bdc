"""The filters of system calls, run by a machine for the few instructions of BPF that they use."""

from __future__ import annotations

import errno
import json
import struct

import pytest

from recipes.confinement import filters

ALLOWED, KILLED = "allowed", "killed"
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
O_CREAT, O_TRUNC, O_CLOEXEC, O_DIRECTORY = 0o100, 0o1000, 0o2000000, 0o200000
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
NEW_NAMESPACES = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)


def decide(code: bytes, machine: str, number: int, *arguments: int) -> str | int:
    """Return what a filter says of one call: allowed, killed, or the number of the error."""
    data = struct.pack("=IIQ6Q", number, MACHINES[machine][1], 0, *arguments, *[0] * (6 - len(arguments)))
    steps = list(struct.iter_unpack("=HBBI", code))
    position, loaded = 0, 0
    while True:
        kind, if_true, if_false, value = steps[position]
        position += 1
        if kind == 0x20:
            (loaded,) = struct.unpack_from("=I", data, value)
        elif kind == 0x06:
            return {0x7FFF0000: ALLOWED, 0x80000000: KILLED}.get(value, value & 0xFFFF)
        else:
            holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[kind]
            position += if_true if holds else if_false


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("make", [filters.jail, filters.scorer])
def test_a_filter_decides_of_every_call_and_lets_none_of_another_architecture_through(make, machine):
    code = make(machine)
    assert len(code) % 8 == 0 and len(code) // 8 < 4096  # BPF_MAXINSNS
    other = next(name for name in MACHINES if name != machine)
    for number in (*range(500), filters.X32, filters.X32 + 2, 2**32 - 1):
        assert decide(code, machine, number) in (ALLOWED, errno.EPERM, errno.ENOSYS)
        assert decide(code, other, number) in (KILLED, errno.EPERM)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_jail_refuses_its_list_and_new_namespaces_alone(machine):
    code, column = filters.jail(machine), MACHINES[machine][0]
    refused = {numbers[column]: name for name, numbers in filters.REFUSED.items()}
    assert len(refused) == len(filters.REFUSED)
    for number in range(500):
        expected = {"clone3": errno.ENOSYS}.get(refused[number], errno.EPERM) if number in refused else ALLOWED
        assert decide(code, machine, number) == expected, number
    clone = filters.CLONE[column]
    for flag in NEW_NAMESPACES:
        assert decide(code, machine, clone, flag | 17) == errno.EPERM, hex(flag)
    assert decide(code, machine, clone, 0x3D0F00) == ALLOWED  # a thread
    if machine == "x86_64":
        assert decide(code, machine, filters.X32 + 319) == errno.ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_podman_gets_the_same_rules(machine):
    rules = json.loads(filters.jail_profile())
    assert rules["defaultAction"] == "SCMP_ACT_ALLOW"
    code, column = filters.jail(machine), MACHINES[machine][0]
    plain = {name: rule["errnoRet"] for rule in rules["syscalls"] if "args" not in rule for name in rule["names"]}
    assert plain == {name: decide(code, machine, numbers[column]) for name, numbers in filters.REFUSED.items()}
    flags = [rule["args"][0]["value"] for rule in rules["syscalls"] if "args" in rule]
    assert sum(flags) == filters.NEW_NAMESPACES and all(flag & (flag - 1) == 0 for flag in flags)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_scorer_may_only_do_what_its_list_has(machine):
    code, column = filters.scorer(machine), MACHINES[machine][0]
    numbers = [pair[column] for pair in filters.ALLOWED.values() if pair[column] != filters.ABSENT]
    assert len(numbers) == len(set(numbers))
    opening = {pair[column]: flags for pair, flags in filters.OPENING.values() if pair[column] != filters.ABSENT}
    allowed = {number for number in range(500) if decide(code, machine, number) == ALLOWED}
    assert allowed == {*numbers, *opening, filters.FCNTL[column]}  # with arguments of zero
    for number, index in opening.items():
        for flags in (0, O_CLOEXEC, O_DIRECTORY | O_CLOEXEC):
            assert decide(code, machine, number, *[7] * index, flags) == ALLOWED
        for flags in (1, 2, 3, O_CREAT, O_TRUNC, O_CLOEXEC | 1, O_CREAT | O_TRUNC | 2):
            assert decide(code, machine, number, *[0] * index, flags) == errno.EPERM
    commands = {
        command for command in range(1100) if decide(code, machine, filters.FCNTL[column], 0, command) == ALLOWED
    }
    assert commands == {0, 1, 2, 3, 4, 1030}


def test_no_number_is_in_both_lists():
    for column in range(2):
        allowed = {numbers[column] for numbers in filters.ALLOWED.values()}
        assert not allowed & {numbers[column] for numbers in filters.REFUSED.values()}
