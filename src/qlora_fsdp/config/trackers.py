"""Which trackers a run reports to, whether they can be used here, and where their settings come from.

A tracker is told by its settings whom to connect to, with the user's key. These come from the environment and from the
user's own folders. W&B and MLflow also look into the current folder, which may have been downloaded with a model or
with data; that is refused here. trackio does not look there, and nothing of a run imports a library that reads `.env`
or `.comet.config` there (tests/security/test_current_folder.py sees which files are opened). Imports no torch.
"""

from __future__ import annotations

import netrc
import os
from collections.abc import Iterator
from configparser import ConfigParser, Error
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from qlora_fsdp.common.errors import Problem
from qlora_fsdp.config.schema import TrackerName, TrackingConfig, WandbMode
from qlora_fsdp.config.settings import problem_with

HOW_TO_LOG_IN = "Run `wandb login`, or set WANDB_API_KEY"
WANDB_HOST = "https://api.wandb.ai"
WANDB_SETTINGS = ("wandb/settings", ".wandb/settings")  # of the current folder, where W&B takes both before the user's
MLFLOW_ADDRESS = "MLFLOW_TRACKING_URI"


def trackers_of(tracking: TrackingConfig) -> list[TrackerName]:
    """Returns the trackers that get figures, in the order of `TrackerName`."""
    return [name for name in _named(tracking) if name is not TrackerName.wandb or gets_wandb(tracking)]


def gets_wandb(tracking: TrackingConfig) -> bool:
    """Whether W&B gets figures: it is named, and is not without a key."""
    return TrackerName.wandb in _named(tracking) and wandb_mode(tracking) is not WandbMode.disabled


def lacks_wandb_key(tracking: TrackingConfig) -> bool:
    """Whether W&B is named and gets nothing, because nobody said how it is reached."""
    is_auto = tracking.wandb_mode is WandbMode.auto
    return TrackerName.wandb in _named(tracking) and is_auto and not gets_wandb(tracking)


def wandb_mode(tracking: TrackingConfig) -> WandbMode:
    """Returns the mode, where `auto` is what WANDB_MODE says, or else online if W&B has a key, and disabled if not."""
    mode = tracking.wandb_mode
    if mode is not WandbMode.auto:
        return mode
    told = os.environ.get("WANDB_MODE")
    if told in ("online", "offline", "disabled"):
        return WandbMode(told)
    return WandbMode.online if _has_wandb_key() else WandbMode.disabled


def _has_wandb_key() -> bool:
    """Whether W&B finds a key to log in with: in the environment, or in the netrc file under the name of its host."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or _saved_host()).hostname or ""
    for name in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        if not name:
            continue
        try:
            if netrc.netrc(str(Path(name).expanduser())).authenticators(host) is not None:
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def check_trackers(tracking: TrackingConfig) -> Iterator[Problem]:
    """Yields why a tracker that is asked for can't be used."""
    unknown = sorted(set(tracking.report_to) - {name.value for name in TrackerName})
    if unknown:
        known = ",".join(name.value for name in TrackerName)
        reason = f"names {', '.join(unknown)}, which is no tracker here."
        yield problem_with(tracking, "tracking.report_to", reason, f"Set some of tracking.report_to=[{known}].")
    for name in trackers_of(tracking):
        if find_spec(name.value) is None:
            reason = f"needs the package {name.value}, which is not installed."
            fix = f"Run pip install {name.value}, or set tracking=none."
            yield problem_with(tracking, "tracking.report_to", reason, fix)
    yield from _check_current_folder(tracking)
    mode = tracking.wandb_mode
    if TrackerName.wandb not in _named(tracking):
        if mode not in (WandbMode.auto, WandbMode.disabled):
            reason = "has no effect: tracking.report_to does not name W&B."
            yield problem_with(tracking, "tracking.wandb_mode", reason, "Set tracking=wandb too, or leave it out.")
    elif mode is WandbMode.online and not _has_wandb_key():
        reason = "needs a key, and W&B has none here."
        fix = f"{HOW_TO_LOG_IN}; or set tracking.wandb_mode=offline, which keeps W&B's files in the run folder."
        yield problem_with(tracking, "tracking.wandb_mode", reason, fix)


def _check_current_folder(tracking: TrackingConfig) -> Iterator[Problem]:
    """Yields why a tracker would let the current folder say whom it connects to."""
    trackers = trackers_of(tracking)
    folder = Path.cwd()
    names = WANDB_SETTINGS if TrackerName.wandb in trackers else ()
    for name in names:
        if not (folder / name).exists():
            continue
        reason = f"would let W&B take its settings from {folder / name}: from the current folder, whoever wrote it. "
        reason += "They say which server gets your key."
        fix = f"Remove {name}, or start in another folder. If it is yours, say the same by W&B's environment "
        fix += "variables (WANDB_BASE_URL, WANDB_ENTITY, ...), in ~/.config/wandb/settings, or by "
        fix += "tracking.wandb_mode=offline."
        yield problem_with(tracking, "tracking.report_to", reason, fix)
    if TrackerName.mlflow in trackers and not os.environ.get(MLFLOW_ADDRESS):
        reason = f"needs {MLFLOW_ADDRESS}: without it MLflow takes mlflow.db or mlruns of the current folder, whoever "
        reason += "wrote them. They say where files are sent."
        fix = "Export it: the address of a server, or a file of yours, "
        fix += f"{MLFLOW_ADDRESS}=sqlite:///{Path.home() / 'mlflow.db'}."
        yield problem_with(tracking, "tracking.report_to", reason, fix)


def _named(tracking: TrackingConfig) -> list[TrackerName]:
    return [name for name in TrackerName if name.value in tracking.report_to]


def _saved_host() -> str:
    """The address that `wandb login --host` has saved."""
    folder = os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
    parser = ConfigParser(interpolation=None)
    try:
        parser.read(Path(folder).expanduser() / "settings")
    except (OSError, Error):
        return WANDB_HOST
    return parser.get("default", "base_url", fallback=WANDB_HOST)
