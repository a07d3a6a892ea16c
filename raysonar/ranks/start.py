"""Start what a configuration asks for: one rank in this process, or a group of Ray actors."""

import torch

from raysonar.config import EngineConfig
from raysonar.model.folder import open_folder
from raysonar.moe.communicator import communicators_of_one_rank
from raysonar.ranks.build import build_rank, check_split
from raysonar.ranks.channel import RankInfo, StepChannel
from raysonar.ranks.draft_model import check_tokenizers
from raysonar.ranks.inprocess import InProcessChannel


def start_ranks(config: EngineConfig, *, progress: bool = False) -> tuple[StepChannel, RankInfo]:
    """Raises ConfigurationError or ModelFolderError when the model cannot be served so."""
    folder = open_folder(config.model)
    check_split(folder, config.parallel)
    if config.speculation.draft is not None:
        check_tokenizers(open_folder(config.speculation.draft), folder)
    if config.parallel.world > 1:
        from raysonar.ranks.group import start_group  # one rank alone needs no Ray

        return start_group(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    channel = InProcessChannel(lambda: build_rank(config, communicators_of_one_rank(), progress=progress))
    return channel, channel.restart()
