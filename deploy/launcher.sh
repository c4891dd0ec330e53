#!/bin/sh
# nri-gpu as a distribution's package installs it. `current` is made when the package is configured; until then, and
# where nothing makes it, the files run as they were unpacked.
folder=$(readlink -e /usr/lib/nri-gpu/current) || folder=/usr/lib/nri-gpu/bundle
exec "$folder/bin/python3" -I "$folder/nri-gpu" "$@"
