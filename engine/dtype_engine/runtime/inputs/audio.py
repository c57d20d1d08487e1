"""Audio for speech and audio models: the user's files or a synthetic tone, processed by the model's feature extractor."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.foreign_code import failures_as
from dtype_engine.core.hints import hint
from dtype_engine.core.input_limits import InputLimits
from dtype_engine.core.options import InputOptions
from dtype_engine.core.text import printable
from dtype_engine.runtime.inputs.batch import Batch, Inputs
from dtype_engine.runtime.inputs.images import decoder_start
from dtype_engine.runtime.inputs.preprocessing import accepted, loaded_by, needed_tokenizer, parameters, running
from dtype_engine.runtime.inputs.processor_limits import made_features
from dtype_engine.runtime.inputs.text import encoded, sequence_length, sources, text_samples
from dtype_engine.runtime.libraries.silence_libraries import without_panic_message
from dtype_engine.runtime.model.live import LiveModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Wave = NDArray[np.float32]
    """The samples of a mono audio signal, from -1 to 1."""

SAMPLE_RATE = 16_000
"""The sample rate in hertz for a model whose feature extractor does not name one. Most speech models use it."""
TONE_SECONDS = 2.0
_UNKNOWN_LENGTH = 2**63 - 1
"""The number of samples that libsndfile reports if the header of a FLAC file does not name it."""
_ARGUMENTS = ("input_features", "input_values")


def sound_argument(model: LiveModel) -> str | None:
    """Return the name of the forward pass's audio argument: `input_features` (a spectrogram), `input_values` (samples) or None."""
    return next((name for name in _ARGUMENTS if name in parameters(model.module)), None)


def sound_inputs(model: LiveModel, options: InputOptions) -> Inputs:
    """Return inputs with one batch for each audio file (or for a synthetic tone), with tokens for the decoder if the model has
    one. Raises UserError for an audio file that can't be used, and NoForward if no audio can be created.
    """
    argument = sound_argument(model)
    assert argument is not None
    extractor = loaded_by(model, "AutoFeatureExtractor")
    decoders, how_decoder = _decoders(model, options)
    limits = options.limits
    shape = None if extractor is not None else _spectrogram_shape(model.module.config, argument)
    what = "a chord that rises and falls"
    if shape is not None:
        if options.audio:
            raise UserError(
                f"{model.title} has no feature extractor that can be loaded (preprocessor_config.json), so "
                f"{options.audio[0]} can't be made into its spectrogram; {hint('tensors')}"
            )
        size = f"a spectrogram of {shape[0]} x {shape[1]}, the size in config.json,"
        limits.refuse_model("values", model.title, size, shape[0] * shape[1])
        calls = [({argument: synthetic_spectrogram(shape)}, f"a synthetic spectrogram, {' x '.join(map(str, shape))}")]
        what = "a spectrogram of smooth waves"
        how = "of the configuration's size: no feature extractor can be loaded from the folder"
    elif extractor is None and argument != "input_values":
        raise NoForward(
            f"{model.title}: no inputs can be made: no feature extractor can be loaded from its folder, and the configuration does "
            f"not say the size of a spectrogram; {hint('tensors')}"
        )
    else:
        rate = int(getattr(extractor, "sampling_rate", None) or SAMPLE_RATE)
        waves = [(open_sound(path, rate, limits), path.name) for path in options.audio] or [(synthetic_tone(rate), "")]
        if extractor is not None:
            made = [_features(model, extractor, wave, rate, argument, limits) for wave, _ in waves]
            how = f"at {rate:,} Hz, by the folder's own {type(extractor).__name__}"
        else:
            channels = int(getattr(model.module.config, "audio_channels", 0))  # codecs: [batch, channels, samples]
            made = [{argument: _normalised(wave, channels)} for wave, _ in waves]
            how = f"at {rate:,} Hz, of mean 0 and variance 1: no feature extractor can be loaded from the folder"
        calls = [(kwargs, _about(wave, rate, name)) for kwargs, (wave, name) in zip(made, waves, strict=True)]
    # Every audio file and every text occurs in a call: the shorter list is repeated.
    pairs = [(calls[at % len(calls)], decoders[at % len(decoders)]) for at in range(max(len(calls), len(decoders)))]
    batches = tuple(Batch(kwargs=kwargs | decoder, about=about) for (kwargs, about), decoder in pairs)
    whose = f"audio: {'your files' if options.audio else what}"
    description = calls[0][1]
    if options.audio:
        description = f"your audio {description}" if len(calls) == 1 else f"{len(calls)} of your audio files"
    return Inputs(batches, description, made_of=(f"{whose}, {how}", *how_decoder), prompts=bool(options.audio))


def _decoders(model: LiveModel, options: InputOptions) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return (the decoder's arguments for each of the user's texts, phrases that say how they were created). If there are no
    texts, there is one set of arguments, with random tokens. Raises UserError for texts that the model can't use.
    """
    if not (options.prompts or options.texts):
        row, how = decoder_start(model)
        return [row], how
    if "decoder_input_ids" not in parameters(model.module):
        raise UserError(f"{model.title} accepts audio and no text; leave the prompts and texts out")
    tokenizer = needed_tokenizer(model)
    longest = sequence_length(model, options)
    ids = [row for row, _ in encoded(tokenizer, list(text_samples(options)), model.title, options)]
    return [decoder_start(model, row[:longest])[0] for row in ids], (f"decoder: {sources(options)}",)


def open_sound(path: Path, rate: int, limits: InputLimits) -> Wave:
    """Return the sound in an audio file, mixed to mono and resampled to `rate` hertz. Raises UserError for a file that can't be
    read or is over the limits.
    """
    import numpy as np
    import soundfile

    damaged = "not a WAV, FLAC, OGG or MP3 file, or damaged"
    opening = failures_as(UserError, f"can't read the audio file {path}", lambda error: damaged)
    with opening, without_panic_message(drop=True), soundfile.SoundFile(path) as file:
        own_rate = file.samplerate
        if file.frames == _UNKNOWN_LENGTH:
            raise UserError(f"the audio file {path} does not say how long it is; convert it to WAV")
        limits.refuse_file("seconds", str(path), file.frames / own_rate)
        limits.refuse_file("values", str(path), file.frames * file.channels)
        limits.refuse_file("values", f"{path} at {rate:,} Hz", file.frames / own_rate * rate)
        frames = file.read(dtype="float32", always_2d=True)
    if not len(frames):
        raise UserError(f"the audio file {path} has no samples")
    with np.errstate(all="ignore"):  # what overflows is refused
        mono: Wave = frames.mean(axis=1)
    if not np.isfinite(mono).all():
        raise UserError(f"the audio file {path} has samples that are not finite")
    return resampled(mono, own_rate, rate)


def resampled(wave: Wave, own_rate: int, rate: int) -> Wave:
    """Return a wave at `rate` instead of `own_rate` hertz, with a low-pass filter against aliasing. The result has ceil(samples *
    rate / own_rate) samples, as in librosa.
    """
    if own_rate == rate:
        return wave
    import numpy as np
    import soxr

    samples = math.ceil(len(wave) * rate / own_rate)
    resampled_wave: Wave = soxr.resample(wave, own_rate, rate)[:samples]
    return np.pad(resampled_wave, (0, samples - len(resampled_wave)))


def synthetic_tone(rate: int) -> Wave:
    """Return a chord (220, 550 and 1320 Hz) at `rate` hertz whose volume swells five times, the same in every run."""
    time = torch.arange(int(TONE_SECONDS * rate), dtype=torch.float64) / rate
    chord = sum(torch.sin(2 * math.pi * hertz * time) / number for number, hertz in enumerate((220, 550, 1320), 1))
    noise = torch.randn(len(time), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    swell = torch.sin(5 * math.pi * time / TONE_SECONDS).square()
    wave: Wave = (0.3 * swell * chord + 0.01 * noise).float().numpy()
    return wave


def synthetic_spectrogram(shape: tuple[int, int]) -> torch.Tensor:
    """Return a spectrogram of smooth waves with a magnitude of about 1 and a little noise: float32 [1, *shape]."""
    generator = torch.Generator().manual_seed(0)
    y, x = torch.meshgrid(torch.linspace(0, 3, shape[0]), torch.linspace(0, 9, shape[1]), indexing="ij")
    return (torch.sin(x + y) * torch.cos(y) + 0.1 * torch.randn(shape, generator=generator))[None]


def _spectrogram_shape(config: Any, argument: str) -> tuple[int, int] | None:
    """Return the numbers of mel bins and frames, in the model's order, or None if the configuration does not specify them.
    argument: the name of the model's audio argument.
    """
    bins = getattr(config, "num_mel_bins", None)
    if argument == "input_features":
        if bins and getattr(config, "max_source_positions", None) and not hasattr(config, "input_feat_per_channel"):
            return int(bins), 2 * int(
                config.max_source_positions
            )  # Whisper: a convolution of stride 2 halves the frames
        width = getattr(config, "input_feat_per_channel", None) or getattr(config, "feature_projection_input_dim", None)
        return (100, int(width)) if width else None
    if bins and getattr(config, "max_length", None):
        return int(config.max_length), int(bins)  # the audio spectrogram transformer
    return None


def _features(
    model: LiveModel, extractor: Any, wave: Wave, rate: int, argument: str, limits: InputLimits
) -> dict[str, Any]:
    what = f"the folder's {type(extractor).__name__}, for {len(wave) / rate:.1f} s of audio,"
    limits.refuse_model("values", model.title, what, made_features(extractor, len(wave)))
    with running(f"the feature extractor of {model.title} refuses the audio"):
        features = accepted(model, extractor(wave, sampling_rate=rate, return_tensors="pt"))
    if argument not in features:
        raise NoForward(f"{model.title}: its {type(extractor).__name__} makes no {argument} for the forward pass")
    return features


def _normalised(wave: Wave, channels: int) -> torch.Tensor:
    """Return a wave scaled to mean 0 and variance 1, as a tensor [1, samples], or [1, channels, samples] if `channels` is not 0."""
    samples = torch.from_numpy(wave)
    samples = (samples - samples.mean()) / (samples.var(unbiased=False) + 1e-7).sqrt()
    return samples.expand(1, channels, -1) if channels else samples[None]


def _about(wave: Wave, rate: int, name: str) -> str:
    title = printable(name, 60) if name else "a synthetic tone"
    return f"{title}, {len(wave) / rate:.1f} s"
