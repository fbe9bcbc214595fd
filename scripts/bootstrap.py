#!/usr/bin/env python3
"""Make (or refresh) the virtual environment that the Makefile uses.

`.venv` gets the versions of constraints-ci.txt, `.venv-floor` (with --floor) those of constraints-floor.txt in their
place where it names them. `.venv` also gets the packages of constraints-peers.txt, without their dependencies: tests
load our exports with them. When nothing changed since the last run this returns at once.

torch comes first and is then left alone: where no NVIDIA GPU is seen, the version in the constraints, otherwise the
newest. DSPARK_TORCH says something else (DSPARK_TORCH="torch==2.12.0"), and pip's own variables say where from
(PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, ...): a CPU build of the same version, where such a place offers one, wins.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time

OLDEST, NEWEST = (3, 10), (3, 13)
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STAMP = "bootstrap.json"


def main():
    parser = argparse.ArgumentParser(description="Make the virtual environment for development and tests.")
    parser.add_argument("--floor", action="store_true", help="the oldest supported Transformers, in .venv-floor")
    parser.add_argument("--force", action="store_true", help="start afresh even when nothing changed")
    args = parser.parse_args()
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        fail(
            f"Python {dotted(sys.version_info)} is not supported: use {dotted(OLDEST)} to {dotted(NEWEST)}, "
            f"for example `make PYTHON=python{dotted(NEWEST)} ...`."
        )

    venv = os.path.join(ROOT, ".venv-floor" if args.floor else ".venv")
    files = ["constraints-ci.txt"] + (["constraints-floor.txt"] if args.floor else [])
    peers = [] if args.floor else ["constraints-peers.txt"]
    wanted = {
        "python": dotted(sys.version_info),
        "root": ROOT,
        "inputs": digest(["pyproject.toml", os.path.join("scripts", "bootstrap.py")] + files + peers),
        "torch": os.environ.get("DSPARK_TORCH", ""),
    }
    if not args.force and is_current(venv, wanted):
        return
    with one_at_a_time():
        if args.force or not is_current(venv, wanted):
            build(venv, wanted, read_constraints(files), peers, afresh=args.force)


def build(venv, wanted, constraints, peers, afresh):
    """Install everything; the stamp says "building" until the last step is done."""
    started = time.monotonic()
    name = os.path.basename(venv)
    stamp = read_stamp(venv)
    if stamp is None and os.path.isdir(venv) and os.listdir(venv):
        fail(f"{name} is there, but this script did not make it: move it away, or remove it.")
    usable = stamp is not None and stamp.get("state") == "ready" and has_python(venv)
    if usable and not afresh and all(stamp.get(key) == wanted[key] for key in ("python", "root")):
        say(f"{name}: updating")
        write_stamp(venv, {"state": "building"})
    else:
        if stamp is not None:
            say(f"{name}: removing the old one")
            shutil.rmtree(venv)
        say(f"{name}: Python {wanted['python']}")
        os.makedirs(venv, exist_ok=True)
        write_stamp(venv, {"state": "building"})
        run(
            [sys.executable, "-m", "venv", venv],
            "could not make a virtual environment (on Debian and Ubuntu: apt install python3-venv)",
        )

    torch = wanted["torch"] or ("torch" if has_gpu() else constraints["torch"][0])
    say(f"{name}: {torch}")
    pip_install(venv, [torch])
    constraints = dict(constraints, torch=["torch==" + installed_version(venv, "torch")])

    path = os.path.join(venv, "constraints.txt")
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(line + "\n" for lines in constraints.values() for line in lines)
    say(f"{name}: everything else")
    pip_install(venv, ["-e", ROOT + "[dev]", "-c", path])
    for peer in peers:
        pip_install(venv, ["--no-deps", "-r", os.path.join(ROOT, peer)])

    write_stamp(venv, dict(wanted, state="ready"))
    say(f"{name}: ready after {time.monotonic() - started:.0f} s")


def read_constraints(files):
    """The lines by project name; a later file's lines replace an earlier one's for the same project."""
    merged = {}
    for name in files:
        found = {}
        with open(os.path.join(ROOT, name), encoding="utf-8") as file:
            for line in (raw.split("#")[0].strip() for raw in file):
                if line:
                    project = re.split(r"[^\w.-]", line, maxsplit=1)[0]
                    found.setdefault(re.sub(r"[-_.]+", "-", project).lower(), []).append(line)
        merged.update(found)
    return merged


def dotted(version):
    return ".".join(str(number) for number in version[:2])


def digest(names):
    total = hashlib.sha256()
    for name in names:
        with open(os.path.join(ROOT, name), "rb") as file:
            total.update(file.read() + b"\0")
    return total.hexdigest()


def is_current(venv, wanted):
    stamp = read_stamp(venv)
    if stamp is None or not has_python(venv):
        return False
    # Without DSPARK_TORCH whatever it chose the last time stays.
    asked = {key: value for key, value in wanted.items() if key != "torch" or value}
    return stamp.get("state") == "ready" and all(stamp.get(key) == value for key, value in asked.items())


def read_stamp(venv):
    """What the stamp says; {} for one that cannot be read, None where there is none."""
    try:
        with open(os.path.join(venv, STAMP), encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return None
    except ValueError:
        return {}


def write_stamp(venv, content):
    path = os.path.join(venv, STAMP)
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
    os.replace(path + ".new", path)


def python_of(venv):
    return os.path.join(venv, *(("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")))


def has_python(venv):
    return os.path.exists(python_of(venv))


def has_gpu():
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and b"GPU" in listed.stdout


def installed_version(venv, project):
    code = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
    return subprocess.check_output([python_of(venv), "-c", code, project], universal_newlines=True).strip()


def pip_install(venv, arguments):
    # --no-compile: most of what is installed is never imported, and the rest is compiled at its first import.
    options = ["-qq", "--no-input", "--disable-pip-version-check", "--no-compile"]
    run([python_of(venv), "-m", "pip", "install"] + options + arguments, "pip could not install what is needed")


def run(command, problem):
    if subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode:
        fail(f"{problem}; the command was\n  {' '.join(command)}")


@contextlib.contextmanager
def one_at_a_time():
    """Wait for another run of this script in the same checkout."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    with open(os.path.abspath(__file__), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(text):
    print("[bootstrap] " + text, flush=True)


def fail(text):
    sys.exit("[bootstrap] error: " + text)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        fail("interrupted; the next run starts again")
