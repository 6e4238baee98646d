"""Puts an exported model on the Hugging Face Hub. Whatever keeps it from that is told with how to upload it later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trimtab.base.errors import ConfigError, Problem, first_line

OPTION = "--to-hub"


def check_name(name: str) -> None:
    """Refuse what cannot be the name of a repository, before anything is written."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        fix = "Write USER/NAME, of letters, digits, '-', '_' and '.'."
        raise ConfigError([Problem(OPTION, f"{name!r} is no name of a model: {first_line(error)}", fix)]) from error


def upload(
    folder: Path, name: str, *, public: bool = False, message: str = "Trained with Trimtab", api: Any = None
) -> str:
    """Upload a folder as the model `name`, made if it is not there; returns its address. A new one is private unless `public`."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    later = f"The model and its card are in {folder}. To upload them later: hf upload {name} {folder}"
    if api is None:
        if get_token() is None:
            what = "there is no Hugging Face token on this machine"
            raise ConfigError([Problem(OPTION, what, f"Run `hf auth login`, or set HF_TOKEN. {later}")])
        api = HfApi(library_name="trimtab")
    try:
        made = api.create_repo(name, private=not public, exist_ok=True)
        full = str(getattr(made, "repo_id", name))
        api.upload_folder(repo_id=full, folder_path=folder, commit_message=message)
    except HfHubHTTPError as error:
        raise ConfigError([Problem(OPTION, f"the Hub refuses {name}: {first_line(error)}", later)]) from error
    except Exception as error:
        if not _is_network(error):
            raise
        what = f"the Hub cannot be reached ({type(error).__name__}: {first_line(error)})"
        raise ConfigError([Problem(OPTION, what, later)]) from error
    return f"https://huggingface.co/{full}"


def _is_network(error: BaseException) -> bool:
    """An error of a connection: of the system, or of the HTTP client that the Hub's library happens to use."""
    kinds = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return isinstance(error, OSError) or bool(kinds & {"httpx", "httpx2", "httpcore", "requests", "urllib3"})
