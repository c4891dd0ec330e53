enable_units() {
    for unit; do
        deb-systemd-helper unmask "$unit" >/dev/null || true
        # The administrator's choice counts after the first installation.
        if deb-systemd-helper --quiet was-enabled "$unit"; then
            deb-systemd-helper enable "$unit" >/dev/null || true
        else
            deb-systemd-helper update-state "$unit" >/dev/null || true
        fi
    done
}

forget_units() {
    for unit; do
        deb-systemd-helper purge "$unit" >/dev/null || true
        deb-systemd-helper unmask "$unit" >/dev/null || true
        rm -f "/etc/systemd/system/multi-user.target.wants/$unit"
    done
}
