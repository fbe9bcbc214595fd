"""What every test shares: no network, caches of its own, one thread per parallel worker, no deadlines."""

import os
import tempfile

# Set before anything imports huggingface_hub, datasets or torch, which read them once.
_home = tempfile.TemporaryDirectory(prefix="dspark-tests-", ignore_cleanup_errors=True)
os.environ["HF_HOME"] = _home.name
for _name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
    os.environ[_name] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if "PYTEST_XDIST_WORKER" in os.environ:
    for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[_name] = "1"

from hypothesis import settings  # noqa: E402

settings.register_profile("dspark", deadline=None)
settings.load_profile("dspark")


def pytest_collection_modifyitems(items):
    """Files with slow tests come first, so that parallel workers end at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
