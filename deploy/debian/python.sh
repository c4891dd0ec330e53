# Says in one sentence what apt would leave to a traceback: which Python is needed. No versioned dependency, because apt
# would then refuse first, without saying what to do. Each package asks, because dpkg goes on with the others of its list.
need_python() {
    supported='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))'
    if ! /usr/bin/python3 -I -c "$supported"; then
        echo "nri-gpu needs Python 3.11 to 3.14, and /usr/bin/python3 is $(/usr/bin/python3 -I -V 2>&1);" \
            "nothing was changed: install the wheel in a virtual environment with one of these instead" >&2
        exit 1
    fi
}
