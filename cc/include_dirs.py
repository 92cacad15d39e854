"""Print, one a line, the installed packages' directories that the extension includes from."""

import sys
from importlib.metadata import distributions
from pathlib import Path

HEADERS = (
    "xla/ffi/api/ffi.h",
    "cudnn_frontend.h",
    "cudnn.h",
    "cuda_runtime_api.h",
    "crt/host_defines.h",
    "nv/target",
)


def include_dirs(headers):
    """Map each of ``headers`` that an installed package has to the directory to include it from."""
    found = {}
    for distribution in distributions():
        for file in distribution.files or ():
            for header in headers:
                if file.as_posix().endswith(f"include/{header}"):
                    path = Path(distribution.locate_file(file)).resolve()
                    found.setdefault(header, path.parents[header.count("/")])
    return found


if __name__ == "__main__":
    found = include_dirs(HEADERS)
    missing = [header for header in HEADERS if header not in found]
    if missing:
        sys.exit(
            f"no package installed for {sys.executable} has {', '.join(missing)}. Build with build "
            "isolation, which fetches the packages that do; or install them (pip install --no-deps "
            "-r cc/headers.txt); or build without the extension "
            "(pip install . -C cmake.define.JQCONV_CUDA=OFF)."
        )
    print("\n".join(dict.fromkeys(str(path) for path in found.values())))
