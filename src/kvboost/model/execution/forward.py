"""The one primitive: runs segments of any requests, packed into one row, through the model.

Prefill, the live tail after a hit, sparse repair, probes, decode and batches are all this call.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import AttentionInterface, GenerationConfig, PreTrainedModel

from kvboost.config import SamplingParams
from kvboost.errors import UnsupportedModelError
from kvboost.model.adapters.adapter import Adapter
from kvboost.model.adapters.files import AdapterFiles
from kvboost.model.adapters.layers import AdapterHooks
from kvboost.model.adapters.reading import refuse
from kvboost.model.execution import attention
from kvboost.model.execution.attention import Batch
from kvboost.model.execution.caches import (
    PackedCache,
    ScanCache,
    SequenceCache,
    StatefulCache,
    observe,
)
from kvboost.model.execution.experts import Experts
from kvboost.model.execution.fast_layers import FastLayers, decoder_layers
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.execution.latent import EXPANSION, latent_layers
from kvboost.model.execution.mixed_kv import make_kv
from kvboost.model.execution.sampling import Sampler, TokenMask
from kvboost.model.execution.scans import scanning, scans
from kvboost.model.execution.segment import ImageRows, Segment
from kvboost.model.execution.shared_steps import SharedSteps
from kvboost.model.execution.states import RowStates
from kvboost.model.loading import key_scales
from kvboost.model.native.decoder import (
    DecoderLayer,
    compare_forward,
    replace_forward,
    restore_forward,
)
from kvboost.model.native.head import Head, install_head
from kvboost.model.native.kernels import Kernels
from kvboost.model.triton.host import to_device
from kvboost.model.vision.deep import DeepFeatures

log = logging.getLogger("kvboost")

PROBED = 8
"""Rows that show whether our layers do what the model's do."""
LAYER_ROUNDING = {torch.bfloat16: 2**-4, torch.float32: 1e-3}
"""The largest distance of logits after all layers, relative to the largest logit."""
QUANTIZED_ROUNDING = 2**-4
"""The same for quantised weights: a number that falls to the other side when rows are rounded to 8
bits makes others do so in later layers."""

AttentionInterface.register(attention.NAME, attention.attend)
AttentionInterface.register(attention.ALONE, attention.attend_alone)
AttentionInterface.register(attention.STEP, attention.attend_step)

_locks: WeakKeyDictionary[PreTrainedModel, threading.RLock] = WeakKeyDictionary()
"""Of models that keep their own attention. A step of several of their requests replaces it
meanwhile, for all engines of the model."""


class Forward:
    """Runs segments through a model. Safe to call from several threads: one runs at a time. A
    thread may run another forward between two parts of its own (``between_parts``).

    ``packed`` models use our attention function, for all segments at once. Other models keep their
    own attention and run the segments one by one, each continuing its own sequence; those with
    states ``share_steps``, if they can.
    """

    beside_rows = num_graphs = 0
    uses_one_thread = False
    """Whether what is planned and chosen between two forwards is little, and one thread does it:
    beside a GPU."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        packed: bool,
        alone_beyond: int | None = None,
        fast_layers: FastLayers | None = None,
        streams: bool = False,
        probed_positions: Sequence[int] = (),
        latent: bool = False,
    ) -> None:
        """``alone_beyond``: segments that reach further run alone, because the model then rotates
        all positions of a call by other factors. ``fast_layers``: what was packed of the model.
        ``streams``: weights of layers come to the device only when they are needed.
        ``probed_positions``: where ``observed`` is to show the KV of a token. ``latent``: layers
        keep latents in place of keys and values."""
        self.model = model
        self.packed = packed
        self.streams = streams
        self._alone_beyond = alone_beyond
        self._own_attention = "sdpa" if model._supports_sdpa else "eager"
        self.lock = threading.RLock() if packed else _locks.setdefault(model, threading.RLock())
        self._deep: DeepFeatures | None = None
        self._depth = 0
        """The number of forwards that have begun and not ended: one within the other."""
        self.between_parts: Callable[[], None] | None = None
        """Called between the parts of forwards on a CPU, in the thread that runs them: before each
        layer, and where torch attends also after its attention."""
        self._selects_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._latents = latent_layers(model) if latent else []
        self._experts = Experts.of(model, streams=streams)
        self.release()  # another engine may have bound it
        key_scales.fold(model)
        with self.lock:
            self.observed = observe(model, probed_positions, latent=latent)
        self.shape, self.num_logits = self.observed.shape, self.observed.num_logits
        self.layers, self.states = self.observed.layers, self.observed.states
        self._check_states()
        self._scans = bool(self.states) and scans(model)
        self.shares_steps = False
        """Whether a model with states computes the next rows of several answers in one forward."""
        self._hooks = AdapterHooks(model)
        self._kernels = Kernels.for_shape(self.shape) if packed else None
        self._head: Head | None = None
        if self._kernels is not None and self.is_uniform:
            self._install_layers(fast_layers or FastLayers())
        self._steps = SharedSteps(model, self.layers, self._call, alone_beyond)
        if self.states:
            self.shares_steps = self._may_share_steps()

    def _install_layers(self, packed: FastLayers) -> None:
        """Makes whole layers run in one call, if the logits equal those of the model's own."""
        layers = decoder_layers(self.model, packed)
        if not layers:
            return
        self._head = install_head(self.model)
        kv = RequestKV(self.uniform_shape, 2 * PROBED)
        rows = torch.arange(1, PROBED, device=self.shape.device)
        probe = [Segment(kv, rows, range(PROBED, 2 * PROBED - 1), PROBED - 1)]
        if packed.is_quantized:
            far, limit = self._furthest_layer(layers, probe), QUANTIZED_ROUNDING
        else:
            expected, limit = self(probe), LAYER_ROUNDING[self.shape.dtype]
        for layer, ours in layers.items():
            replace_forward(layer, ours)
        if not packed.is_quantized:
            far = float(_distance(self(probe), expected))
        self.release()
        if not far < limit:
            log.warning("our whole layers are off by %.3f; the model's own are left alone", far)
            for layer in layers:
                restore_forward(layer)

    def _furthest_layer(
        self, layers: Mapping[nn.Module, DecoderLayer], probe: Sequence[Segment]
    ) -> float:
        """The distance of one of our layers from the model's own on the same rows. With quantised
        weights, rows are rounded to 8 bits, so that small differences grow from layer to layer."""
        distances: list[torch.Tensor] = []
        for layer, ours in layers.items():
            compare_forward(layer, ours, _distance, distances)
        self(probe)
        for layer in layers:
            restore_forward(layer)
        return float(max(distances))

    @property
    def takes_steps(self) -> bool:
        """Whether rows of several requests may share a forward, whatever their positions."""
        return self.packed and self._alone_beyond is None

    @property
    def keeps_latents(self) -> bool:
        """Whether a row of its KV is a latent, which is both key and value."""
        return bool(self._latents)

    @property
    def fits_pages(self) -> bool:
        """Whether kernels over pages take a row of its KV."""
        return all(latent.fits_pages for latent in self._latents)

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have KV of their own and of one shape."""
        alike = len(self.shape.groups) == 1
        all_layers = range(self.model.config.get_text_config().num_hidden_layers)
        return alike and list(self.layers) == list(all_layers)

    @property
    def uniform_shape(self) -> KVShape:
        """The shape of all layers, for what serves only models in which they are alike."""
        (shape,) = self.shape.groups
        return shape

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.shape.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the numbers that it computes with."""
        return self.shape.dtype

    @property
    def has_kernels(self) -> bool:
        """Whether our kernels run this model."""
        return self._kernels is not None

    def bind(self) -> None:
        """Makes the model use our attention and our experts."""
        if self._experts is not None:
            self._experts.bind()
        if self.packed and self.model.config._attn_implementation != attention.NAME:
            self._own_attention = self.model.config._attn_implementation
            key_scales.fold(self.model)
            self._set_attention(attention.NAME)
        if self._latents and not self._latents[0].is_bound:  # or those of another engine are
            for latent in self._latents:
                latent.bind()

    def release(self) -> None:
        """Restores the model's own attention and experts."""
        with self.lock:
            if self._experts is not None:
                self._experts.release()
            if not self.streams:
                key_scales.unfold(self.model)
            if self.model.config._attn_implementation == attention.NAME:
                self._set_attention(self._own_attention)
                for latent in self._latents:
                    latent.release()

    def _set_attention(self, name: str) -> None:
        """Changes the attention of the text model, and of no vision tower beside it."""
        parts = {"text_config"} & set(self.model.config.sub_configs)
        self.model.set_attn_implementation({"": name, **dict.fromkeys(parts, name)})

    def load_adapter(self, files: AdapterFiles) -> Adapter:
        """Makes an adapter ready for requests. Waits for the forward that runs now."""
        expansions = {latent.expansion for latent in self._latents}
        if files.invocation and expansions & set(files.shapes):
            raise refuse(
                files.path,
                f"it changes {EXPANSION!r} and is activated within a prompt (aLoRA), whose latents "
                "would be expanded by two weights; train it without that module",
            )
        adapter = self._hooks.make(files)
        with self.lock:
            self._hooks.install(adapter.deltas)
        return adapter

    def remove_adapters(self) -> None:
        """Removes all traces of adapters from the model."""
        with self.lock:
            self._hooks.remove()

    def __call__(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Logits ``[wanted rows, vocab]`` of all segments, in order. Writes the fresh rows of
        every segment into its KV, which must be large enough. Ends after the last layer that a
        segment needs: those above must not matter to the segments that end before (``until``)."""
        with self.lock, torch.inference_mode():
            self.bind()
            if not self.packed:
                if self.shares_steps:
                    self._steps.run(segments)
                return torch.cat([self._run_unpacked(each) for each in segments])
            if self._must_run_apart(segments):
                return torch.cat([self._run_packed([each]) for each in segments])
            return self._run_packed(segments)

    def run(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        """The logits of each segment, ``[num_logits, vocab]``. All are packed into one forward, but
        for those that must end in a layer: such as end in the same one share another."""
        together: dict[int | None, list[int]] = {}
        for index, segment in enumerate(segments):
            end = None if segment.may_go_on else segment.until
            together.setdefault(end, []).append(index)
        results: dict[int, torch.Tensor] = {}
        for indices in together.values():
            indices.sort(key=lambda index: _digest(segments[index]))
            packed = [segments[index] for index in indices]
            parts = torch.split(self(packed), [segment.num_logits for segment in packed])
            results.update(zip(indices, parts, strict=True))
        return [results[index] for index in range(len(segments))]

    def run_one(self, segment: Segment) -> torch.Tensor:
        """The same for a segment alone."""
        return self.run([segment])[0]

    def hidden(self, segments: Sequence[Segment]) -> Sequence[torch.Tensor]:
        """The last hidden states ``[rows, width]`` of each segment, as the output head gets them.
        Writes the rows of the segments into their KV, like a call."""
        found: list[torch.Tensor] = []
        thread = threading.get_ident()

        def note(module: Any, args: Any, output: Any) -> None:
            # Others run forwards between two of ours, and this thread between two layers.
            if threading.get_ident() == thread and self._depth == depth:
                found.append(output.last_hidden_state[0])

        with self.lock:
            depth = self._depth + 1
            handle = self.model.base_model.register_forward_hook(note)
        try:
            self(segments)
        finally:
            with self.lock:
                handle.remove()
        return torch.split(torch.cat(found), [len(segment) for segment in segments])

    def sampler(
        self,
        kv: RequestKV,
        params: SamplingParams,
        defaults: GenerationConfig,
        prompt_ids: Sequence[int] | npt.NDArray[np.integer[Any]],
        mask: TokenMask | None = None,
    ) -> Sampler:
        """The sampler of a request, among the tokens that a mask allows."""
        return Sampler(params, defaults, prompt_ids, self.shape.device, mask)

    def run_rows(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        batch: Batch,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits ``[wanted, vocab]`` of some rows of ``batch``, of all if ``wanted`` is None. For
        those who hold the lock: it is what decode steps and the runner record."""
        some = {} if wanted is None or not self._selects_rows else {"logits_to_keep": wanted}
        logits: torch.Tensor = self.model(
            input_ids=ids[None],
            position_ids=positions[None],
            past_key_values=self._cache(batch),
            use_cache=True,
            **some,
        ).logits[0]
        return logits if wanted is None or some else logits[wanted]

    def _must_run_apart(self, segments: Sequence[Segment]) -> bool:
        if len(segments) == 1:
            return False
        if len({segment.kv.slab for segment in segments}) > 1:
            return True
        limit = self._alone_beyond
        return limit is not None and any(s.end > limit for s in segments)

    def _run_packed(self, segments: Sequence[Segment]) -> torch.Tensor:
        try:
            return self._run_batch(segments)
        except attention.StopForward:
            return torch.empty(0, self.num_logits, device=self.shape.device)

    def _run_batch(self, segments: Sequence[Segment]) -> torch.Tensor:
        if segments[0].kv.slab is not None:
            from kvboost.model.paged.batch import PagedBatch

            return self._run(segments, self._cache(PagedBatch(segments)))
        kernels = None if self._runs_as_stock(segments) else self._kernels
        if any(segment.whole_images for segment in segments):
            kernels = None  # ours are causal
        cache = self._cache(Batch(segments, kernels, self.between_parts))
        if self._head is None:
            return self._run(segments, cache)
        with self._head.turned(on=kernels is not None):
            return self._run(segments, cache)

    def _cache(self, batch: Batch) -> PackedCache:
        return PackedCache(batch, self.layers, latent=self.keeps_latents)

    def _runs_as_stock(self, segments: Sequence[Segment]) -> bool:
        """Whether to make stock transformers' calls: for a segment that asks for it and is alone.
        In bfloat16 only from position 0, because packed layers run later rows in any case."""
        first = segments[0]
        if len(segments) > 1 or not first.as_stock:
            return False
        return self.shape.dtype == torch.float32 or (first.is_plain and first.first == 0)

    def _experts_for(self, segments: Sequence[Segment]) -> AbstractContextManager[None]:
        if self._experts is None or not self._runs_as_stock(segments):
            return nullcontext()
        return self._experts.as_stock()

    def _run_unpacked(self, segment: Segment) -> torch.Tensor:
        """One segment through the model's own attention, after what came before it."""
        if not self.states:
            return self._run([segment], SequenceCache(segment, self.layers, self.between_parts))
        states = segment.kv.states
        if states is None:
            states = segment.kv.states = RowStates(self.states)
        if (done := states.result_of(segment)) is not None:
            return done
        kind = ScanCache if self._scans else StatefulCache
        states.begin(segment.first)
        with scanning():
            logits = self._run([segment], kind(segment, self.layers, states, self.between_parts))
        states.end(segment.end, segment, logits)
        return logits

    def _may_share_steps(self) -> bool:
        """Whether rows of two texts get the same logits together as alone."""
        segments = []
        for length in (PROBED, PROBED // 2):
            kv = make_kv(self.shape, PROBED + 1)
            ids = torch.arange(1, length + 2, device=self.device)
            self([Segment(kv, ids[:-1], range(length))])
            segments.append(Segment(kv, ids[-1:], range(length, length + 1)))
        try:
            with self.lock, torch.inference_mode():
                together = self._steps.compute(segments)[1]
            far = float(_distance(together, self(segments)))
        except Exception as error:
            log.warning("this model's layers with states take one request at a time: %s", error)
            return False
        finally:
            self.release()
        if not far < LAYER_ROUNDING.get(self.dtype, QUANTIZED_ROUNDING):
            log.warning("logits of rows together are off by %.3f; requests run one by one", far)
            return False
        return True

    def _check_states(self) -> None:
        """Raises UnsupportedModelError for a model whose states are found only now."""
        if self.packed and self.states:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} keeps states beside its keys and values, and the "
                "table of architectures says that it does not; please report this"
            )

    def _run(self, segments: Sequence[Segment], cache: PackedCache | SequenceCache) -> torch.Tensor:
        device = self.shape.device
        images = self._image_rows(segments)
        kwargs = self._inputs(segments, images)
        if self.packed or self.states:
            kwargs["position_ids"] = _rotated_by(segments, device)
        wanted = _wanted_rows(segments, device)
        if self._selects_rows:
            kwargs["logits_to_keep"] = wanted
        with self._deep_features(images):
            logits = self._call(segments, past_key_values=cache, **kwargs)[0]
        return logits if self._selects_rows else logits[wanted]

    def _call(self, segments: Sequence[Segment], **kwargs: Any) -> torch.Tensor:
        """The logits that the model gives for the rows of ``segments``."""
        self._depth += 1
        try:
            with self._experts_for(segments), self._hooks.applied(segments):
                logits: torch.Tensor = self.model(use_cache=True, **kwargs).logits
        finally:
            self._depth -= 1
        return logits

    def _image_rows(self, segments: Sequence[Segment]) -> ImageRows | None:
        """The rows of images among those of all segments."""
        rows, features, first = [], [], 0
        for segment in segments:
            if (images := segment.images) is not None:
                rows.append(images.rows + first)
                features.append(images.features)
            first += len(segment)
        if not rows:
            return None
        there = to_device(torch.cat(rows), torch.int64, self.shape.device)
        return ImageRows(there, torch.cat(features))

    def _inputs(self, segments: Sequence[Segment], images: ImageRows | None) -> dict[str, Any]:
        """The tokens of all segments, or their embeddings if some rows are those of images."""
        token_ids = _token_ids(segments, self.shape.device)[None]
        if images is None:
            return {"input_ids": token_ids}
        embedded = self.model.get_input_embeddings()(token_ids)
        embedded[0, images.rows] = images.features[:, 0].to(embedded)
        return {"inputs_embeds": embedded}

    def _deep_features(self, images: ImageRows | None) -> AbstractContextManager[None]:
        """Adds the features of images to what the first layers give, while a forward runs."""
        if self._deep is None:
            if images is None or images.features.shape[1] == 1:
                return nullcontext()
            self._deep = DeepFeatures(self.model.get_decoder().layers)
        rows = None if images is None else images.rows
        deep = () if images is None else images.features.unbind(1)[1:]
        return self._deep.added(rows, deep)


def _distance(given: torch.Tensor, expected: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    """Of the number that is furthest off, relative to the largest."""
    return (given - expected).abs().max() / expected.abs().max()


def _digest(segment: Segment) -> str:
    """Sorts segments by adapter, so that the rows of one adapter follow one another."""
    applied = segment.kv.adapter
    return "" if applied is None else applied.adapter.digest


def _token_ids(segments: Sequence[Segment], device: torch.device) -> torch.Tensor:
    """The token ids of all segments, sent in one copy if they are on the host."""
    ids = [segment.token_ids for segment in segments]
    if any(some.device != ids[0].device for some in ids):
        ids = [some.to(device) for some in ids]
    return to_device(torch.cat(ids), torch.int64, device)


def _rotated_by(segments: Sequence[Segment], device: torch.device) -> torch.Tensor:
    """The positions that the model rotates rows by, ``[1, rows]``, or ``[3, 1, rows]``."""
    if all(segment.places is None for segment in segments):
        return torch.cat([segment.position_ids(device) for segment in segments])[None]
    places = [
        segment.position_ids(device).expand(3, -1)
        if segment.places is None
        else to_device(segment.places, torch.int64, device)
        for segment in segments
    ]
    return torch.cat(places, 1)[:, None]


def _wanted_rows(segments: Sequence[Segment], device: torch.device) -> torch.Tensor:
    rows: list[int] = []
    end = 0
    for segment in segments:
        end += len(segment)
        rows += range(end - segment.num_logits, end)
    return to_device(rows, torch.int64, device)
