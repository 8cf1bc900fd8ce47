"""Tokenizers of several families, trained here on a few sentences."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ngramloss.models.loading import train_tokenizer

TEXTS = [
    "The cat sat on the mat. It slept there all day! Was the dog awake?",
    "Dogs ran home quickly in 2024. A naïve café owner in Łódź said “no”.",
    "summarize: rain is expected in the north, and wind in the south. Nobody came.",
]


@cache
def ours():
    """As recipes train it: byte-level BPE, <s> text </s>."""
    return train_tokenizer(TEXTS, 400)


def bart_like():
    """Byte-level BPE in which a word after a space has pieces of its own."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    bpe.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=special,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    bpe.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), trim_offsets=False, add_prefix_space=False
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        cls_token="<s>",
        pad_token="<pad>",
        unk_token="<unk>",
    )


def t5_like():
    """Unigram with ▁ for a space, text </s>, no token that begins a text."""
    unigram = Tokenizer(models.Unigram())
    unigram.normalizer = normalizers.NFKC()
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    unigram.train_from_iterator(
        TEXTS,
        trainers.UnigramTrainer(
            vocab_size=120, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
        ),
    )
    unigram.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=unigram, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


def bert_like():
    """WordPiece, [CLS] text [SEP], no token for the end of a text."""
    pieces = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    pieces.normalizer = normalizers.BertNormalizer()
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pieces.train_from_iterator(
        TEXTS,
        trainers.WordPieceTrainer(
            vocab_size=200, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"], show_progress=False
        ),
    )
    pieces.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=pieces, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    )


def mbart_like():
    """Ours, with a language after the end of a text."""
    tokenizer = train_tokenizer(TEXTS, 400)
    tokenizer.add_special_tokens({"additional_special_tokens": ["en_XX"]})
    language = tokenizer.convert_tokens_to_ids("en_XX")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s> en_XX", special_tokens=[("</s>", 2), ("en_XX", language)]
    )
    return tokenizer


FAMILIES = {"ours": ours, "bart": bart_like, "t5": t5_like, "bert": bert_like, "mbart": mbart_like}


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def gpt_like(*, bos=True, template=CHATML):
    """Byte-level BPE without a padding token; <s> begins a text, nothing ends it."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, show_progress=False, initial_alphabet=alphabet),
    )
    if bos:
        bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer
