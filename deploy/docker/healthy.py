"""Health check of a container: `python healthy.py http://127.0.0.1:9100/readyz`. Prints why not, for `docker inspect`."""

import http.client
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 4.0

try:
    with urllib.request.urlopen(sys.argv[1], timeout=TIMEOUT_S) as answer:  # noqa: S310  the address is in the compose file
        print(answer.status)  # noqa: T201
except urllib.error.HTTPError as error:
    sys.exit(f"{error.code}: {error.read(500).decode(errors='replace').strip()}")
except (OSError, http.client.HTTPException) as error:
    sys.exit(f"{sys.argv[1]} does not answer: {error}")
