#!/bin/sh
# Make a virtual environment and install a list of requirements into it. `make setup` calls this:
#
#     sh requirements/setup.sh .venv requirements/cpu.txt
#
# It takes the newest supported Python that it finds, or the one that PYTHON names. When there is none, uv gets one.
# An environment that is there already is kept when its Python is right. Otherwise it is made anew.
set -eu
venv=$1
list=$2  # empty when this kind of machine has none
supported="3.14 3.13 3.12 3.11"    # newest first; tests/test_lock.py checks the lists for each
fetched=3.13                       # uv gets this one when there is none
torch_cpu=https://download.pytorch.org/whl/cpu
case "$(uname -m) $list" in
    "aarch64 "*gpu.txt) supported="3.12 3.11" fetched=3.12 ;;  # vLLM needs pynvvideocodec: no wheels for newer ones
esac

stop() {
    echo "tba_min: $1" >&2
    exit 1
}

version() {  # the version of the Python $1, for example 3.13; nothing when it does not run
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

is_supported() {
    case " $supported " in *" $(version "$1") "*) ;; *) return 1 ;; esac
}

[ -n "$list" ] || stop "no packages for $(uname -s) $(uname -m); it runs on Linux x86_64 and aarch64, and macOS arm64"

# ---- which Python: `python` can make environments; `bare` cannot, because its ensurepip is missing ------------------

python=""
bare=""
if [ -n "${PYTHON:-}" ]; then
    [ -n "$(version "$PYTHON")" ] || stop "PYTHON=$PYTHON is no Python that runs; name one of these: $supported"
    is_supported "$PYTHON" || stop "PYTHON=$PYTHON is Python $(version "$PYTHON"); name one of these: $supported"
fi
for v in $supported; do
    for name in ${PYTHON:-"python$v" python3 python}; do
        [ "$(version "$name")" = "$v" ] || continue
        if "$name" -c 'import ensurepip, venv' 2>/dev/null; then
            python=$name
            break 2
        fi
        bare=${bare:-$name}
    done
done

# ---- the environment ----------------------------------------------------------------------------------------------

find_uv() {  # print the path of uv; install it into the folder $1 when the machine has none
    if command -v uv; then
        return
    fi
    for name in ${bare:-} python3 python; do
        if "$name" -m venv "$1/venv" && "$1/venv/bin/python" -m pip install uv; then
            where=$1/venv
        elif "$name" -m pip install --target "$1/target" uv; then  # a Debian with pip and without venv
            where=$1/target
        else
            continue
        fi >/dev/null 2>&1
        echo "$where/bin/uv"
        return
    done
}

make_with_uv() {  # make an environment with the Python $1, a path or a version
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    uv=$(find_uv "$folder")
    [ -n "$uv" ] || return 1
    echo "tba_min: uv makes $venv with Python $1 ..."
    "$uv" venv --quiet --seed --python "$1" "$venv"
}

is_right() {  # whether the environment that is there already is right
    is_supported "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1 || return 1
    [ -z "${PYTHON:-}" ] || [ "$(version "$PYTHON")" = "$(version "$venv/bin/python")" ]
}

if ! is_right; then
    if [ -f "$venv/pyvenv.cfg" ]; then
        rm -rf "$venv"
    fi
    if [ -n "$python" ]; then
        "$python" -m venv "$venv"
    elif [ -n "$bare" ]; then
        make_with_uv "$bare" ||
            stop "$bare cannot make environments; on Debian and Ubuntu: apt install python$(version "$bare")-venv"
    else
        make_with_uv "$fetched" ||
            stop "no Python here is one of these: $supported; install one, or uv, which gets one (docs.astral.sh/uv)"
    fi
fi

# ---- the packages -------------------------------------------------------------------------------------------------

pip() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --quiet "$@"
}

echo "tba_min: Python $(version "$venv/bin/python") in $venv gets $list: about 2 GB, a few minutes, once ..."
torch=$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' "$list")
if [ -n "$torch" ] && [ "$(uname -s)" = Linux ]; then
    # the CPU build; it satisfies `torch==2.13.0` in the list. Your index may have it, PyTorch's has it.
    log=$venv/torch.log
    pip --no-deps "$torch+cpu" 2>"$log" || pip --no-deps --index-url "$torch_cpu" "$torch+cpu" 2>>"$log" || {
        echo "tba_min: no CPU build of torch is in reach ($log); PyPI's is taken, with CUDA's libraries: 4 GB more"
        pip "$torch" --constraint "$list"
    }
fi
case $list in
    *cpu.txt | *macos.txt) pip --no-deps -r "$list" ;;    # complete lists
    *) pip -r "$list" ;;
esac
case $list in
    *cpu.txt)  # vLLM's wheel lacks this library, and so does a small Debian or Fedora
        "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
            echo "tba_min: vLLM needs libnuma.so.1; install it: apt install libnuma1, or dnf install numactl-libs" ;;
esac
echo "tba_min: $venv is set up."
