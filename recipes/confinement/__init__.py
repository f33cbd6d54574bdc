"""How programs that are not trusted are confined: bubblewrap's words (`jails.py`), filters of system calls
(`filters.py`), and what a jail uses while it runs (`usage.py`).

Each kind of program has one profile, by name:

    profile              for whom                         what it promises
    jails.program        a program that a model wrote     sees this machine's programs read-only; writes to memory of
                         (sandbox)                        a set size; no network, no rights, no other processes
    jails.scorer         the verifiers that score model   sees Python and our code read-only, and an empty /tmp; no
                         text                             network, no rights, no other processes
    jails.task           the container of a SWE task      sees its image below a layer that ends with it; is root in it
                                                          and nobody outside; no network, no rights
    jails.checked_image  a command in an image that is    as a task's container, with a read-only /inputs; with the
                         checked                          network where the check needs it
    jails.repository     git on the repository of an      sees the repository, which it may change, and this machine's
                         image                            programs read-only; no network, no rights
    jails.agent          an agent's program, which the    sees what its user sees; what it starts ends with it
                         operator installed
    filters.jail         programs, tasks' containers      no memory beside the limits, no new namespaces or mounts,
                                                          none of the kernel's interfaces that bypass a jail
    filters.scorer       the process that reads model     may compute, read, and answer on its pipes; nothing else
                         text

Where this account has root's rights, a program also becomes nobody (`jails.nobody_words`, `as_nobody.sh`). Limits of
memory, time, processes and files are the caller's: it sets them inside the jail.

The sandbox image has a copy of this room, so it imports nothing but the standard library.
"""
