"""Worker: `python -m services.learner.conversion.worker REQUEST FOLDER RESULT`, the process of one conversion."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from services.common.config.settings import Platform
from services.common.errors import ConfigError, MillraceError
from services.common.service.process_tree import die_with_parent, end_process
from services.learner.conversion.request import Conversion, Converted, Direction


def convert(request: Conversion, folder: Path) -> Converted:
    """Converts into a folder that exists and is empty."""
    from services.learner.megatron.platform import prepare

    prepare(Platform.CPU)
    from services.learner.conversion.hugging_face import to_hugging_face
    from services.learner.conversion.megatron import to_megatron

    match request.direction:
        case Direction.TO_HUGGING_FACE:
            return to_hugging_face(request, folder)
        case Direction.TO_MEGATRON:
            return to_megatron(request, folder)


def main() -> None:
    """Entry point; writes what came of it as JSON: `{"converted": …}`, or `{"problems": [[field, message], …]}`."""
    die_with_parent(signal.SIGKILL)
    request, folder, result = Conversion.read(Path(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3])
    said: dict[str, Any]
    try:
        said = {"converted": asdict(convert(request, folder))}
    except ConfigError as error:
        said = {"problems": [[problem.field, problem.message] for problem in error.problems]}
    except OSError as error:
        said = {"problems": [["", str(error) if error.filename else f"{request.out}: {error.strerror}"]]}
    except MillraceError as error:
        said = {"problems": [["", str(error)]]}
    result.write_text(json.dumps(said))
    end_process(0 if "converted" in said else 1)


if __name__ == "__main__":
    main()
