# Whether a process has $2 in its file $1 of /proc. By the environment, because it would find its own argument; in parts,
# because a node can have more processes than a command line has room for.
in_use() {
    printf '%s\n' /proc/[0-9]*/"$1" | SOUGHT=$2 xargs sh -c 'echo "$SOUGHT" | grep -lsFf - "$@"' sh | grep -q .
}
