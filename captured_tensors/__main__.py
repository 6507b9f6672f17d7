"""``python -m captured_tensors``: check the shipped cases against their manifest; ``--write`` renews it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from captured_tensors.manifest import DEFAULT_CASES, Manifest, describe
from captured_tensors.schema import CaptureError
from captured_tensors.store import iter_case_paths, load_case


def build_manifest(folder: Path) -> Manifest:
    """Describe every case file below ``folder``."""
    return Manifest(tuple(describe(load_case(file), file, folder) for file in iter_case_paths(folder)))


def main(argv: list[str] | None = None) -> int:
    """Returns 0, or 2 when a file is unusable or is not the one that the manifest describes."""
    parser = argparse.ArgumentParser(prog="python -m captured_tensors", description=__doc__)
    parser.add_argument("manifest", nargs="?", type=Path, default=DEFAULT_CASES)
    parser.add_argument(
        "--write", action="store_true", help="describe the files in the manifest's folder anew"
    )
    args = parser.parse_args(argv)
    try:
        if args.write:
            args.manifest.write_text(build_manifest(args.manifest.parent).to_json(), encoding="utf-8")
        for file in iter_case_paths(args.manifest):
            case = load_case(file)
            print(
                f"{case.name}: bs {case.bs}, T {case.T}, H {case.H}, L {list(case.prefix_lengths)}, "
                f"{case.meta.algorithm}, layer {case.meta.layer_id}, {case.meta.gpu}"
            )
    except (CaptureError, OSError) as err:
        print(err, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
