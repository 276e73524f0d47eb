#!/usr/bin/env bash
# Makes the image NAME, on which the others are built here instead of python:3.11-slim-bookworm: Debian with Python,
# the authorities that this machine trusts, and the pip settings in the file PIP_CONF. Needs root and debootstrap.
set -euo pipefail
name=$1 pip_conf=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv,wget bookworm "$folder" \
    http://deb.debian.org/debian >&2
cp /etc/ssl/certs/ca-certificates.crt "$folder/etc/ssl/certs/ca-certificates.crt"
cp "$pip_conf" "$folder/etc/pip.conf"
ln -s python3 "$folder/usr/bin/python"
rm -rf "$folder"/var/cache/apt/archives/*.deb "$folder"/var/lib/apt/lists/*
tar -C "$folder" -c . | docker import --change 'CMD ["bash"]' - "$name"
