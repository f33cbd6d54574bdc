#!/usr/bin/env bash
# prepare.sh WORKSPACE BASE [HIDDEN...]: make a task's repository hold nothing beyond its checked-out commit.
#
# It removes the HIDDEN paths first. Then branches, remotes, later tags, reflogs, notes, other work trees, borrowed and
# unreachable objects go. Tags that HEAD reaches stay: versions are computed from them. It fails unless HEAD is BASE or
# one commit of the image's own on top of it, and unless all objects that are left can be reached.
set -euo pipefail
export LC_ALL=C GIT_CONFIG_NOSYSTEM=1 GIT_TERMINAL_PROMPT=0 GIT_NO_LAZY_FETCH=1 GIT_ALLOW_PROTOCOL=none
export GIT_NO_REPLACE_OBJECTS=1
HOME=$(mktemp -d) # some versions of git read safe.directory from the user's configuration only
export HOME
trap 'rm -rf -- "$HOME"' EXIT
printf '[safe]\n\tdirectory = *\n' >"$HOME/.gitconfig"

workspace=$1 base=$2
shift 2

git() {
  command git -c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.pager=cat -c gc.auto=0 "$@"
}

refuse() {
  printf 'prepare: %s\n' "$1" >&2
  exit 3
}

if (($#)); then rm -rf -- "$@"; fi
cd "$workspace"
[[ -d .git && ! -L .git ]] || refuse "no repository at $workspace"
head=$(git rev-parse --verify --quiet 'HEAD^{commit}') || refuse 'HEAD is no commit'
git merge-base --is-ancestor "$base" "$head" || refuse "HEAD $head does not hold the base commit $base"
(($(git rev-list --count "$base..$head") <= 1)) || refuse "HEAD $head is beyond the base commit $base"

# Borrowed objects are copied before the place that they are borrowed from goes.
lenders=()
for list in .git/objects/info/alternates .git/objects/info/http-alternates; do
  [[ -f $list ]] || continue
  while IFS= read -r lender; do
    [[ $lender == /* ]] || lender=.git/objects/$lender
    lenders+=("$lender")
  done <"$list"
done

branch=$(git rev-parse --symbolic-full-name HEAD)
comm -23 \
  <(git for-each-ref --format='%(refname)' | sort) \
  <({ printf '%s\n' "$branch" && git tag --merged "$head" --format='%(refname)'; } | sort) |
  sed 's/^/delete /' | git update-ref --no-deref --stdin
git remote | while IFS= read -r remote; do git remote remove "$remote"; done
rm -rf .git/logs .git/worktrees .git/rr-cache .git/lost-found .git/info/grafts
for name in FETCH_HEAD ORIG_HEAD MERGE_HEAD CHERRY_PICK_HEAD REVERT_HEAD REBASE_HEAD BISECT_HEAD AUTO_MERGE \
  COMMIT_EDITMSG MERGE_MSG SQUASH_MSG packed-refs.lock gc.log rebase-merge rebase-apply sequencer; do
  rm -rf ".git/$name"
done
find .git/objects -name '*.keep' -delete -o -name '*.promisor' -delete -o -name '*.bitmap' -delete
find .git/objects -name 'multi-pack-index*' -delete -o -name '*.mtimes' -delete
rm -rf .git/objects/info/commit-graph .git/objects/info/commit-graphs
git repack -a -d -q
rm -f .git/objects/info/alternates .git/objects/info/http-alternates
for lender in "${lenders[@]}"; do rm -rf -- "$lender"; done
git prune --expire=now
git pack-refs --all

left=$(comm -23 \
  <(git cat-file --batch-all-objects --batch-check='%(objectname)' | sort) \
  <(git rev-list --objects --indexed-objects --all HEAD | cut -d ' ' -f 1 | sort -u))
[[ -z $left ]] || refuse "objects beyond HEAD are left, such as ${left%%$'\n'*}"
