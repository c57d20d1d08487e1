"""Model folders as people have them: small random models of the zoo with their tokenizer and processor beside them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import transformers
from PIL import Image
from tests.helpers import architectures
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

IMAGE_TOKEN = architectures.VOCABULARY - 1
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CHAT = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}so {% endif %}"
)


def tokenizer(**more: object) -> transformers.PreTrainedTokenizerBase:
    """A tokenizer of letters with BERT's rules, of 58 tokens; `<image>` is the last of the zoo's vocabulary."""
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    vocabulary = {word: place for place, word in enumerate(words)} | {"<image>": IMAGE_TOKEN}
    return transformers.BertTokenizer(vocab=vocabulary, **more)


def save(name: str, folder: Path, processed: bool = True) -> Path:
    """Write a model of the zoo (or `qwen2_5_vl`), and what prepares its inputs where `processed`."""
    module = qwen() if name == "qwen2_5_vl" else architectures.make(name)[0]
    module.save_pretrained(folder)
    if not processed:
        return folder
    if name in ("llama", "bert", "t5"):
        tokenizer().save_pretrained(folder)
    elif name == "vit":
        ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    elif name == "blip":
        images = BlipImageProcessorPil(size={"height": 32, "width": 32})
        transformers.BlipProcessor(images, tokenizer()).save_pretrained(folder)
    elif name == "clip":
        transformers.CLIPProcessor(_clip_images(), tokenizer()).save_pretrained(folder)
    elif name == "llava":
        processor = transformers.LlavaProcessor(
            _clip_images(), tokenizer(extra_special_tokens={"image_token": "<image>"}), patch_size=16,
            vision_feature_select_strategy="default", num_additional_image_tokens=1, image_token="<image>",
            chat_template=CHAT,
        )  # fmt: skip
        processor.save_pretrained(folder)
    elif name == "whisper":
        extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1, hop_length=400)
        extractor.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    elif name == "wav2vec2":
        transformers.Wav2Vec2FeatureExtractor().save_pretrained(folder)
    elif name == "qwen2_5_vl":
        Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=56 * 56).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    return folder


def _clip_images() -> CLIPImageProcessorPil:
    return CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})


def qwen() -> transformers.PreTrainedModel:
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "vocab_size": architectures.VOCABULARY,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 14,
            "out_hidden_size": 32, "fullatt_block_indexes": [1],
        },
        image_token_id=IMAGE_TOKEN, video_token_id=62, vision_start_token_id=61, vision_end_token_id=60,
    )  # fmt: skip
    transformers.set_seed(0)
    return transformers.Qwen2_5_VLForConditionalGeneration(config).eval()


def write_picture(path: Path, width: int = 48, height: int = 40) -> Path:
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(values, "RGB").save(path)
    return path
