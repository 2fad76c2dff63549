"""Builds the wheel: the module of this folder with the shared library in it.

The library is called through ctypes, so one wheel is for all versions of Python 3. Nothing but
Python and cargo is needed: `pip wheel .`, or `pip install .`. A library that is built already is
taken with `pip wheel --config-settings library=FILE .`, where FILE is an absolute path.
"""

import base64
import hashlib
import json
import pathlib
import subprocess
import sysconfig
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
NAME = "epoxide_vgpu"
LIBRARY = "libepoxide_vgpu_cuda.so"


def _cargo(*arguments):
    """The lines that cargo prints, for the crate that has this folder."""
    command = ["cargo", *arguments, "--manifest-path", str(HERE.parent / "Cargo.toml")]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.decode().splitlines()


def _library():
    """Builds the shared library, and returns its path."""
    for line in _cargo("build", "--release", "--lib", "--message-format=json"):
        for file in json.loads(line).get("filenames", []):
            if file.endswith(LIBRARY):
                return pathlib.Path(file)
    raise RuntimeError(f"cargo built no {LIBRARY}")


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    built = (config_settings or {}).get("library")
    if built and not pathlib.Path(built).is_absolute():
        raise RuntimeError(f"library={built}: must be an absolute path, since pip builds in another folder")
    version = _cargo("pkgid")[0].rsplit("@", 1)[1]
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    tag = f"py3-none-{platform}"
    info = f"{NAME}-{version}.dist-info"
    library = pathlib.Path(built) if built else _library()
    files = {
        f"{NAME}/__init__.py": (HERE / NAME / "__init__.py").read_bytes(),
        f"{NAME}/{LIBRARY}": library.read_bytes(),
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: epoxide-vgpu\nVersion: {version}\nSummary: Runs PTX on the CPU, with checks\n"
            "License: MIT OR Apache-2.0\nRequires-Python: >=3.8\n"
        ).encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: epoxide\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
    }
    record = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(data)}")
    files[f"{info}/RECORD"] = "\n".join(record + [f"{info}/RECORD,,", ""]).encode()
    wheel = f"{NAME}-{version}-{tag}.whl"
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return wheel
