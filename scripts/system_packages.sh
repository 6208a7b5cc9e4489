#!/usr/bin/env bash
# Install the Debian packages that some tests use: browsers, test networks, and a SLURM of their own. Without them those
# tests are skipped, with the reason. Does nothing where they are there, where there is no apt-get, or without root.
set -uo pipefail

packages=(chromium firefox-esr iproute2 munge nftables openssl slurm-client slurmctld slurmd)
limit_s=600

missing=()
for package in "${packages[@]}"; do
    status=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null)
    [[ $status == installed ]] || missing+=("$package")
done
((${#missing[@]} == 0)) && exit 0
if ! command -v apt-get >/dev/null || ((EUID != 0)); then
    echo "system packages: not installed, so that some tests are skipped: ${missing[*]}"
    exit 0
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
# SECONDS is how long this has taken.
timeout "$limit_s" apt-get update -qq >"$log" 2>&1
if timeout "$((limit_s - SECONDS > 1 ? limit_s - SECONDS : 1))" \
    apt-get install -qq --no-install-recommends "${missing[@]}" >>"$log" 2>&1; then
    echo "system packages: installed ${missing[*]} in $SECONDS s"
else
    echo "system packages: apt-get failed after $SECONDS s, so that some tests are skipped: ${missing[*]}"
    tail -n 5 "$log"
fi
