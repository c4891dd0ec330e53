LIB=/usr/lib/nri-gpu
LIVE=$LIB/live

# Leave the tree that `current` leads to, and those of processes that still run: they may still import from theirs. The
# next configuration asks again.
remove_other_trees() {
    tree=$(readlink -e "$LIB/current") || tree=
    for each in "$LIVE"/*; do
        if [ "$each" = "$tree" ] || in_use cmdline "$each/"; then continue; fi
        rm -rf "$each"
    done
}
