"""Folders of multilingual models as on the hub, but tiny: tokenizers from a SentencePiece model, random weights."""

import io
import json

import sentencepiece
import torch
import transformers
from transformers import M2M100Config, M2M100ForConditionalGeneration, MBartConfig, MBartForConditionalGeneration
from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES

PAIRS = [
    ("A man rides a red bike.", "Ein Mann fährt ein rotes Fahrrad."),
    ("Two dogs play in the snow.", "Zwei Hunde spielen im Schnee."),
    ("The girl reads a long book.", "Das Mädchen liest ein langes Buch."),
    ("A woman sells fresh bread.", "Eine Frau verkauft frisches Brot."),
    ("Children run across the street.", "Kinder laufen über die Straße."),
    ("The old train leaves at noon.", "Der alte Zug fährt um zwölf Uhr ab."),
    ("A boy throws a ball into the lake.", "Ein Junge wirft einen Ball in den See."),
    ("People wait in front of the house.", "Leute warten vor dem Haus."),
    ("The cat sleeps under the table.", "Die Katze schläft unter dem Tisch."),
    ("Three men repair the roof.", "Drei Männer reparieren das Dach."),
    ("She drinks a cup of hot tea.", "Sie trinkt eine Tasse heißen Tee."),
    ("A band plays music in the park.", "Eine Band spielt Musik im Park."),
    ("The chef cuts green apples.", "Der Koch schneidet grüne Äpfel."),
    ("He climbs a steep mountain.", "Er klettert auf einen steilen Berg."),
    ("A white horse jumps over the fence.", "Ein weißes Pferd springt über den Zaun."),
    ("The teacher writes on the board.", "Die Lehrerin schreibt an die Tafel."),
]
LANGUAGES = {
    "mbart": ("en_XX", "de_DE"),
    "mbart50": ("en_XX", "de_DE"),
    "m2m100": ("en", "de"),
    "nllb": ("eng_Latn", "deu_Latn"),
}


def sentencepiece_model(texts=tuple(text for pair in PAIRS for text in pair), pieces=220):
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=written,
        vocab_size=pieces,
        hard_vocab_limit=False,
        model_type="bpe",
        character_coverage=1.0,
        minloglevel=2,
    )
    return written.getvalue()


def tokenizer(family, folder):
    """The family's own tokenizer, from a SentencePiece file as the hub has it."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = folder / "sentencepiece.bpe.model"
    pieces.write_bytes(sentencepiece_model())
    if family == "m2m100":
        model = sentencepiece.SentencePieceProcessor(model_file=str(pieces))
        words = ["<s>", "<pad>", "</s>", "<unk>", *(model.id_to_piece(index) for index in range(3, len(model)))]
        (folder / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
        return transformers.M2M100Tokenizer(str(folder / "vocab.json"), str(pieces))
    if family == "nllb":
        codes = transformers.models.nllb.tokenization_nllb.FAIRSEQ_LANGUAGE_CODES
        return transformers.NllbTokenizer.from_pretrained(folder, extra_special_tokens=codes)
    return {"mbart": transformers.MBartTokenizer, "mbart50": transformers.MBart50Tokenizer}[family].from_pretrained(
        folder
    )


def model_folder(family, folder, *, start="given"):
    """A folder with a random model of 2 + 2 layers and its tokenizer.

    Args:
        family: a key of ``LANGUAGES``.
        folder: where.
        start: ``given``: config and generation settings have the right start token; ``absent``: they do not name it;
            ``none``: they name none; ``wrong``: the generation settings name another.
    """
    made = tokenizer(family, folder / "pieces")
    made.save_pretrained(folder)
    torch.manual_seed(0)
    right = made.convert_tokens_to_ids("de_DE") if family == "mbart" else made.eos_token_id
    tokens = len(made) + (8 + len(FAIRSEQ_LANGUAGE_CODES["m2m100"])) * (
        family == "m2m100"
    )  # it does not count its languages
    sizes = dict(
        vocab_size=tokens,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        max_position_embeddings=64,
        init_std=0.05,
    )
    config, kind = (
        (MBartConfig, MBartForConditionalGeneration)
        if family.startswith("mbart")
        else (M2M100Config, M2M100ForConditionalGeneration)
    )
    model = kind(config(**sizes))
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = right
    model.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        if start == "absent":
            content.pop("decoder_start_token_id", None)
        elif start == "none":
            content["decoder_start_token_id"] = None
        elif start == "wrong" and name == "generation_config.json":
            content["decoder_start_token_id"] = made.bos_token_id
        (folder / name).write_text(json.dumps(content))
    return folder
