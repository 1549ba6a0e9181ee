"""A stateless transducer: predictor, joiner, and the heads that a step runs over them.

The predictor reads the last tokens alone (Ghodsi et al., "RNN-Transducer with Stateless Prediction
Network", 2020); its convolution in groups is that of icefall's recipes.

Shapes: B streams, N rows (streams or paths), T encoder frames, D encoder width, C tokens of
context, E embedding, J joiner, V vocabulary with the blank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oasr_backend.cache.state_spec import StreamStateSpec
from oasr_backend.decoders.transducer.network import TransducerNetwork
from oasr_backend.errors import ConfigError, check_whole
from oasr_backend.kernels.ctc import best_tokens
from oasr_backend.models.base import EncoderCaches
from oasr_backend.models.heads import Head

#: Channels that an output of the predictor's convolution reads.
GROUP_CHANNELS = 4
_CONTEXT = "transducer_context"
_CONFIG = "the transducer"


@dataclass(frozen=True)
class TransducerConfig:
    """Sizes of a transducer. Raises ConfigError, by the field's name, for one that cannot be.

    model_dim      width of the encoder's frames
    joiner_dim     width in which frames and predictions are added
    embedding_dim  width of a token's embedding; a multiple of 4 where the context is above 1
    """

    model_dim: int
    joiner_dim: int
    embedding_dim: int
    vocab_size: int
    context_size: int
    blank_id: int = 0

    def __post_init__(self) -> None:
        check_whole(_CONFIG, least=1, model_dim=self.model_dim, joiner_dim=self.joiner_dim)
        check_whole(_CONFIG, least=1, embedding_dim=self.embedding_dim, vocab_size=self.vocab_size)
        check_whole(_CONFIG, least=1, context_size=self.context_size)
        check_whole(_CONFIG, least=0, blank_id=self.blank_id)
        if self.blank_id >= self.vocab_size:
            raise ConfigError(
                f"{_CONFIG}: blank_id={self.blank_id} is none of the {self.vocab_size} units; "
                f"give one below {self.vocab_size}"
            )
        if self.context_size > 1 and self.embedding_dim % GROUP_CHANNELS:
            raise ConfigError(
                f"{_CONFIG}: embedding_dim={self.embedding_dim} is no multiple of "
                f"{GROUP_CHANNELS}, the channels of a group; give one that is"
            )


class StatelessPredictor(nn.Module):
    """The last tokens to one vector: embeddings, and for a context above 1 a convolution and ReLU.

    Each position's share of the convolution is a linear map of one token's embedding, so that it is
    tabulated for all tokens. `eval()` does so, once the weights are there; `train()` lets go of it.
    """

    table_XE: Tensor
    first_row_C: Tensor

    def __init__(self, config: TransducerConfig) -> None:
        super().__init__()
        size, width = config.context_size, config.embedding_dim
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.conv: nn.Conv1d | None = None
        if size > 1:
            groups = width // GROUP_CHANNELS
            self.conv = nn.Conv1d(width, width, size, groups=groups, bias=False)
        # A position's rows begin with that of -1, "no token", which is zero.
        first_row_C = torch.arange(size) * (config.vocab_size + 1) + 1
        self.register_buffer("first_row_C", first_row_C, persistent=False)
        self.register_buffer("table_XE", torch.empty(0, width), persistent=False)

    def forward(self, context_NC: Tensor) -> Tensor:
        """(N, C) int64, the newest token last and -1 for none, to (N, E)."""
        table_XE = self._tabulated() if self.training else self.table_XE
        shares_NCE = F.embedding(context_NC + self.first_row_C, table_XE)
        if self.conv is None:
            return shares_NCE.squeeze(1)
        return shares_NCE.sum(1).relu()

    def train(self, mode: bool = True) -> StatelessPredictor:
        super().train(mode)
        self.table_XE = self.table_XE[:0] if mode else self._tabulated().detach()
        return self

    def _tabulated(self) -> Tensor:
        """(C * (V + 1), E): what each token, at each position, adds before the ReLU."""
        weight_VE = self.embedding.weight
        if self.conv is None:
            return F.pad(weight_VE, (0, 0, 1, 0))
        # Groups G of outputs O that read inputs I.
        kernel_GOIC = self.conv.weight.view(-1, GROUP_CHANNELS, *self.conv.weight.shape[1:])
        inputs_VGI = weight_VE.view(len(weight_VE), -1, GROUP_CHANNELS)
        shares_CVE = torch.einsum("vgi,goic->cvgo", inputs_VGI, kernel_GOIC).flatten(2)
        return F.pad(shares_CVE, (0, 0, 1, 0)).flatten(0, 1)


class Joiner(nn.Module):
    """Frames and predictions in one width, and the units' logits from their sum."""

    def __init__(self, config: TransducerConfig) -> None:
        super().__init__()
        self.encoder_proj = nn.Linear(config.model_dim, config.joiner_dim)
        self.decoder_proj = nn.Linear(config.embedding_dim, config.joiner_dim)
        self.output_linear = nn.Linear(config.joiner_dim, config.vocab_size)

    def forward(self, frames_NJ: Tensor, predicted_NJ: Tensor) -> Tensor:
        """Both projected. Returns (N, V) logits."""
        logits_NV: Tensor = self.output_linear(torch.tanh(frames_NJ + predicted_NJ))
        return logits_NV


class Transducer(nn.Module):
    """Implements TransducerNetwork. `blank_penalty` is to be set before a step is captured."""

    penalised_V: Tensor

    def __init__(self, config: TransducerConfig) -> None:
        super().__init__()
        self.config = config
        self.context_size, self.blank_id = config.context_size, config.blank_id
        self.blank_penalty = 0.0
        self.decoder = StatelessPredictor(config)
        self.joiner = Joiner(config)
        is_blank_V = torch.arange(config.vocab_size) == config.blank_id
        self.register_buffer("penalised_V", is_blank_V.float(), persistent=False)

    @property
    def start_context(self) -> tuple[int, ...]:
        return (*(-1,) * (self.context_size - 1), self.blank_id)

    def project(self, encoded_BTD: Tensor) -> Tensor:
        """(B, T, D) encoder frames to (B, T, J)."""
        frames_BTJ: Tensor = self.joiner.encoder_proj(encoded_BTD)
        return frames_BTJ

    def predict(self, context_NC: Tensor) -> Tensor:
        predicted_NJ: Tensor = self.joiner.decoder_proj(self.decoder(context_NC))
        return predicted_NJ

    def logits(self, frames_NJ: Tensor, predicted_NJ: Tensor) -> Tensor:
        logits_NV: Tensor = self.joiner(frames_NJ, predicted_NJ)
        if self.blank_penalty:
            logits_NV = logits_NV - self.blank_penalty * self.penalised_V
        return logits_NV


class JoinerHead(Head):
    """Frames as the joiner adds them to predictions: what a beam search reads."""

    name = "joiner"

    def __init__(self, transducer: Transducer) -> None:
        super().__init__()
        self.transducer = transducer

    def forward(self, encoded_BTD: Tensor) -> Tensor:
        """(B, T, D) to (B, T, J)."""
        return self.transducer.project(encoded_BTD)


class GreedyTransducerHead(Head):
    """The best unit of every frame, of which all but blank are the next frames' context.

    Gives (B, T, 2) int32: units, and the bits of their float32 log-probs. A frame gives one unit.
    """

    name = "transducer_greedy"
    start_C: Tensor

    def __init__(self, transducer: Transducer) -> None:
        super().__init__()
        self.transducer = transducer
        # Stored less the start context, since zero is every state's initial value.
        self.state_specs = (
            StreamStateSpec(_CONTEXT, (transducer.context_size,), dtype=torch.int64),
        )
        start_C = torch.tensor(transducer.start_context)
        self.register_buffer("start_C", start_C, persistent=False)

    def step(self, encoded_BTD: Tensor, caches: EncoderCaches) -> Tensor:
        state = caches.states[_CONTEXT]
        context_BC = state.gather() + self.start_C
        output_BT2, contexts_TBC = self._search(encoded_BTD, context_BC)
        # Frames past a row's end have outputs, which are not read, and no say in its context.
        last_1BC = caches.num_new_B.long()[None, :, None].expand(1, *context_BC.shape)
        state.scatter(contexts_TBC.gather(0, last_1BC)[0] - self.start_C)
        return output_BT2

    def forward(self, encoded_BTD: Tensor) -> Tensor:
        """From the start context."""
        return self._search(encoded_BTD, self.start_C.expand(len(encoded_BTD), -1))[0]

    def _search(self, encoded_BTD: Tensor, context_BC: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs, and the (T + 1, B, C) contexts before each frame and after the last."""
        is_on_host = encoded_BTD.device.type == "cpu"
        search = self._search_on_host if is_on_host else self._search_on_device
        return search(encoded_BTD, context_BC)

    def _search_on_device(self, encoded_BTD: Tensor, context_BC: Tensor) -> tuple[Tensor, Tensor]:
        """Looks at no value, so that it can be captured."""
        network: TransducerNetwork = self.transducer
        units_2BT, contexts = [], [context_BC]
        for frame_BJ in self.transducer.project(encoded_BTD).unbind(1):
            logits_BV = network.logits(frame_BJ, network.predict(context_BC))
            best_2B1 = best_tokens(logits_BV.unsqueeze(1))
            # Where int64 meets int32, the result is int64.
            unit_B1 = best_2B1[0]
            extended_BC = torch.cat((context_BC[:, 1:], unit_B1), dim=1)
            context_BC = torch.where(unit_B1 == network.blank_id, context_BC, extended_BC)
            units_2BT.append(best_2B1)
            contexts.append(context_BC)
        output_BT2 = torch.cat(units_2BT, dim=2).movedim(0, 2).contiguous()
        return output_BT2, torch.stack(contexts)

    def _search_on_host(self, encoded_BTD: Tensor, context_BC: Tensor) -> tuple[Tensor, Tensor]:
        """Predicts anew for rows with a unit alone, since here to look at values costs no wait."""
        network: TransducerNetwork = self.transducer
        predicted_BJ = network.predict(context_BC)
        logits, contexts = [], [context_BC]
        for frame_BJ in self.transducer.project(encoded_BTD).unbind(1):
            logits.append(network.logits(frame_BJ, predicted_BJ))
            unit_B = logits[-1].max(dim=-1).indices
            rows_N = (unit_B != network.blank_id).nonzero().squeeze(1)
            if len(rows_N):
                unit_N1 = unit_B[rows_N].unsqueeze(1)
                extended_NC = torch.cat((context_BC[rows_N, 1:], unit_N1), dim=1)
                context_BC = context_BC.index_copy(0, rows_N, extended_NC)
                predicted_NJ = network.predict(extended_NC)
                predicted_BJ = predicted_BJ.index_copy(0, rows_N, predicted_NJ)
            contexts.append(context_BC)
        best_2BT = best_tokens(torch.stack(logits, dim=1))
        return best_2BT.movedim(0, 2).contiguous(), torch.stack(contexts)
