#!/usr/bin/env bash
#
# The first process of a container. It runs in the image's own bash, and starts what the worker asks for on its standard
# input; when that ends, because the worker has closed the container or died, the container ends.
#
# Usage: bash -c "$(<init.sh)" init TOKEN PROCESSES FILE_KIB
#
#   TOKEN  what it prints when it is ready; what the image's own scripts print by chance is another text
#
# A request is "shell NAME" or "script NAME". The pipes NAME.input, NAME.output and NAME.control are in /.shells.

token=$1 processes=$2 file_kib=$3
set --
for file in /.singularity.d/env/*.sh; do
  # shellcheck disable=SC1090
  [[ ! -f ${file} ]] || . "${file}"
done
cd /
ulimit -c 0 -u "${processes}" -f "${file_kib}" || exit 1
exec 2>/dev/null
printf '%s\n' "${token}"
exec >/dev/null
unset file token processes file_kib
while read -r kind name; do
  set -m # every request is a process group of its own
  (
    trap : HUP INT QUIT TERM # a command that signals its whole group must not end this process
    exec 3>"/.shells/${name}.control" 4>"/.shells/${name}.output" <"/.shells/${name}.input"
    echo "opened ${BASHPID}" >&3
    case ${kind} in
      # Interactive, because such a bash goes on with its next line of input after an interrupt.
      shell) bash --noprofile --norc --noediting -i +H +m ;;
      script) bash --noprofile --norc >&4 2>&1 3>&- 4>&- ;;
    esac
    echo "ended $?" >&3
  ) &
  set +m
done
