"""The configuration files of the throw-away cluster: slurm.conf, gres.conf, slurmdbd.conf, hosts."""

from __future__ import annotations

from pathlib import Path

NETWORK = "10.77.0"  # of the cluster's own network namespace: several clusters do not meet
LOGIN = f"{NETWORK}.1"
_FIRST_TTY = 10  # device files that exist on every machine stand for GPUs

SLURM_CONF = """\
ClusterName=ci
SlurmctldHost=login({login})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until its old credential has expired: seconds here, two minutes by default.
AuthInfo=socket={directory}/run/munge.sock,cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/nodes/%n/spool
SlurmctldPidFile={directory}/run/slurmctld.pid
SlurmdPidFile={directory}/nodes/%n/slurmd.pid
SlurmctldLogFile={directory}/log/slurmctld.log
SlurmdLogFile={directory}/log/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=10
KillWait=10
MinJobAge=3600
InactiveLimit=0
MailProg=/bin/true
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=200000,bf_interval=2,batch_sched_delay=0,defer_batch_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobRequeue=1
JobCompType=jobcomp/filetxt
JobCompLoc={directory}/log/jobcomp.txt
JobAcctGatherType=jobacct_gather/linux
"""
ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=login
AccountingStoragePass={directory}/run/munge.sock
AccountingStorageEnforce=associations
"""
SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={directory}/run/munge.sock
DbdHost=login
SlurmUser=root
LogFile={directory}/log/slurmdbd.log
PidFile={directory}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
"""


def address(number: int) -> str:
    """Return the address of node `number`, from 1."""
    return f"{NETWORK}.{10 + number}"


def write_conf(directory: Path, *, num_nodes: int, cpus: int, gpus: int, accounting: bool) -> None:
    """Write every file that the cluster's programs read into `directory`/etc."""
    etc = directory / "etc"
    nodes, gres = range(1, num_nodes + 1), f"Gres=gpu:{gpus} " if gpus else ""
    lines = [SLURM_CONF.format(directory=directory, login=LOGIN)]
    if gpus:
        lines.append("GresTypes=gpu\n")
    if accounting:
        lines.append(ACCOUNTING.format(directory=directory))
        (etc / "slurmdbd.conf").write_text(SLURMDBD_CONF.format(directory=directory), encoding="utf-8")
        (etc / "slurmdbd.conf").chmod(0o600)  # slurmdbd insists
    lines += [
        f"NodeName=n{node} NodeAddr={address(node)} NodeHostname=n{node} CPUs={cpus} Boards=1 SocketsPerBoard=1 "
        f"CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=8000 {gres}State=UNKNOWN\n"
        for node in nodes
    ]
    lines.append(f"PartitionName=batch Nodes=n[1-{num_nodes}] Default=YES MaxTime=INFINITE State=UP\n")
    (etc / "slurm.conf").write_text("".join(lines), encoding="utf-8")
    if gpus:
        files = f"/dev/tty[{_FIRST_TTY}-{_FIRST_TTY + gpus - 1}]" if gpus > 1 else f"/dev/tty{_FIRST_TTY}"
        (etc / "gres.conf").write_text(f"NodeName=n[1-{num_nodes}] Name=gpu File={files}\n", encoding="utf-8")
    hosts = ["127.0.0.1 localhost", f"{LOGIN} login", *(f"{address(node)} n{node}" for node in nodes)]
    (etc / "hosts").write_text("".join(f"{line}\n" for line in hosts), encoding="utf-8")
