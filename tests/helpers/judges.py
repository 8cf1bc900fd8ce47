"""Tiny classifiers of pairs of texts, and their definition: one pair at a time, without padding."""

import re

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

TEXTS = [
    "The cat sat on the mat. It slept there all day! Was the dog awake?",
    "Dogs ran home quickly in 2024. A naïve café owner in Łódź said “no”.",
    "Rain is expected in the north, and wind in the south. Nobody came to the hall.",
]


PAIRS = [
    ("The cat sat on the mat.", "A cat sat."),
    ("Dogs ran home.", "Nobody came to the hall in the north."),
    ("", "The dog slept."),
    ("It slept there all day!", ""),
    ("cat", "dog"),
    ("A naïve café owner in Łódź said “no”.", "东京 下雨了 😀"),
    ("wind " * 300, "Rain is expected."),
    ("Rain", "wind and rain " * 200),
    ("rain and wind " * 90, "wind and rain " * 40),
]


SIZES = {
    "vocab_size": 200,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "initializer_range": 0.25,
}


def words(*special):
    """A vocabulary in a fixed order: a trained one would come out in another each time."""
    found = {word for text in TEXTS for word in re.findall(r"\w+", text.lower())}
    return [*special, *sorted(found), *".,!?“”abcdefghijklmnopqrstuvwxyz"]


def wordpiece():
    known = words("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") + [
        f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"
    ]
    known = {word: at for at, word in enumerate(dict.fromkeys(known))}
    pieces = Tokenizer(models.WordPiece(known, unk_token="[UNK]"))
    pieces.normalizer = normalizers.BertNormalizer()
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pieces.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=pieces,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def byte_level():
    known = ["<s>", "<pad>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bpe = Tokenizer(models.BPE(vocab={piece: at for at, piece in enumerate(known)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        cls_token="<s>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    )


def unigram():
    """ALBERT's own class, which gives no segments unless it is asked to."""
    special = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
    known = dict.fromkeys(["▁", *(f"▁{word}" for word in words()), *words()])
    return transformers.AlbertTokenizer(
        vocab=[(word, 0.0) for word in special] + [(word, -5.0 - 1 / len(word)) for word in known]
    )


TOKENIZERS = {"bert": wordpiece, "roberta": byte_level, "albert": unigram}


def made(
    folder,
    kind="bert",
    *,
    outputs=("SUPPORTS", "REFUTES", "NOT ENOUGH INFO"),
    positions=64,
    seed=1,
    sharpness=6,
    **options,
):
    """A folder with a small random classifier of that kind. The model is returned too."""
    torch.manual_seed(seed)
    tokenizer = TOKENIZERS[kind]()
    if outputs:
        options |= {"id2label": dict(enumerate(outputs)), "label2id": {label: at for at, label in enumerate(outputs)}}
    if kind == "albert":
        options |= {"embedding_size": 8, "num_hidden_groups": 1}
    sizes = SIZES | {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": positions,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = transformers.AutoConfig.for_model(kind, **sizes | options)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    head = getattr(model.classifier, "out_proj", model.classifier)
    with torch.no_grad():  # sure of itself and even-handed: no layer amplifies rounding, and all answers are met
        head.weight *= sharpness
        head.bias -= (
            torch.stack([plain_logits(model, tokenizer, pair, positions - 2) for pair in PAIRS]).median(0).values
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def plain_ids(tokenizer, premise, hypothesis, longest):
    """Both texts' ids and segments: the longer text loses its last token until they fit."""
    first, second = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (premise, hypothesis))
    begin, end = [tokenizer.cls_token_id], [tokenizer.sep_token_id]
    middle = end * 2 if tokenizer.cls_token == "<s>" else end
    while len(first) + len(second) + 2 + len(middle) > longest:
        (first if len(first) > len(second) else second).pop()
    head, tail = begin + first + middle, second + end
    return head + tail, [0] * len(head) + [1] * len(tail)


@torch.no_grad()
def plain_logits(model, tokenizer, pair, longest):
    ids, segments = plain_ids(tokenizer, *pair, longest)
    extra = {} if tokenizer.cls_token == "<s>" else {"token_type_ids": torch.tensor([segments])}
    return model(input_ids=torch.tensor([ids]), **extra).logits[0]


def plain(model, tokenizer, pair, longest):
    """The definition: one pair, no batch, no padding, no mask."""
    return plain_logits(model, tokenizer, pair, longest).softmax(-1).tolist()
