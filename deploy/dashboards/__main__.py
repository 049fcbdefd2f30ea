"""`python -m deploy.dashboards [--check]`: writes the dashboards' JSON, or tells which file is out of date (exit code 1)."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from deploy.dashboards import asynchrony, data, fleet, learning, overview

FOLDER = Path(__file__).parents[1] / "grafana" / "dashboards"
DASHBOARDS = {
    "overview": overview.dashboard,
    "asynchrony": asynchrony.dashboard,
    "learning": learning.dashboard,
    "data": data.dashboard,
    "fleet": fleet.dashboard,
}


def documents() -> dict[str, str]:
    """Each dashboard's JSON text, by name."""
    return {
        name: json.dumps(build().build(), cls=JSONEncoder, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        for name, build in DASHBOARDS.items()
    }


def outdated() -> list[Path]:
    """Files that do not hold what the code says, and files of no dashboard."""
    wanted = {FOLDER / f"{name}.json": text for name, text in documents().items()}
    strangers = set(FOLDER.glob("*.json")) - wanted.keys()
    return sorted(
        [path for path, text in wanted.items() if not path.exists() or path.read_text() != text] + [*strangers]
    )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m deploy.dashboards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file is out of date")
    if parser.parse_args().check:
        stale = outdated()
        if stale:
            sys.exit(f"out of date: {', '.join(map(str, stale))}; run `python -m deploy.dashboards`")
        return
    for name, text in documents().items():
        (FOLDER / f"{name}.json").write_text(text)


if __name__ == "__main__":
    main()
