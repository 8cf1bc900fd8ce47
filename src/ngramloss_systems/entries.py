"""names of the systems that the paper compares with → their entries, read before any of their code."""

from dataclasses import fields

from ngramloss import Setting, System, recipe

SIMCLS = System(
    "SimCLS (Liu and Liu 2021): chooses among candidates of any writer; ngramloss rerank trains and applies it",
    ("simcls", "simcls-demo"),
    "ngramloss_systems.simcls",
    options={
        "margin": Setting(0.01, least=0, most=2, help="how much higher a candidate's cosine should be than the next"),
        "gold_margin": Setting(0.0, least=0, most=2, help="how much higher the reference's cosine should be than any"),
        "gold_weight": Setting(1.0, least=0, most=1000, help="weight of the reference's margin"),
        "pooling": Setting("first", choices=("first", "mean"), help="what stands for a text: its first token"),
    },
    after="ngramloss rerank apply {run} CANDIDATES --out DIR",
    bests={"score": True, "loss": False},
    settable=recipe.affecting("documents"),
    first={"data.candidates": "train={ce:train},validation={ce:validation}"},
    beyond_cnndm=("data.max_target=80",),
)

BERTSUM_EXT = System(
    "BertSumExt (Liu and Lapata 2019): takes sentences of the document that an encoder marks",
    ("bertsum-ext", "bertsum-ext-demo"),
    "ngramloss_systems.bertsum_ext",
    options={
        "layers": Setting(2, least=0, most=2**8, help="layers over the sentences"),
        "heads": Setting(8, least=1, most=2**12, help="heads of these layers"),
        "feed_forward": Setting(2048, least=1, most=2**20, help="width inside these layers"),
        "dropout": Setting(0.1, least=0, below=1, help="dropout of these layers"),
        "oracle": Setting(3, least=1, most=1000, help="most sentences that the oracle marks in training"),
        "sentences": Setting(3, least=1, most=1000, help="most sentences of a summary"),
        "blocking": Setting(True, help="leave out a sentence that shares three words in a row with another"),
        "min_words": Setting(6, least=0, most=1000, help="words of the shortest sentence that may be taken"),
    },
    not_used=("data.prefix", "data.candidates"),
    bests={"loss": False, "score": True},
    task="summarisation",
)

POINTER_GENERATOR = System(
    "Pointer-generator with coverage (See et al. 2017): an LSTM that writes words and copies unknown ones",
    ("pointer-generator", "pointer-generator-demo"),
    "ngramloss_systems.pointer_generator",
    options={
        "embeddings": Setting(128, least=1, most=2**16, help="width of a word's embedding"),
        "lowercase": Setting(False, help="read and write without capitals"),
        "coverage": Setting(1.0, least=0, most=1000, help="weight of the coverage loss"),
        "coverage_from": Setting(
            0.987, least=0, most=1, help="the share of steps after which coverage begins; 1 is never"
        ),
        "optimizer": Setting("adagrad", choices=("adagrad", "adamw"), help="what changes the weights"),
        "accumulator": Setting(0.1, above=0, most=1000, help="where Adagrad's sums of squares begin"),
    },
    not_used=(
        *("data.prefix", "data.candidates", "model.architecture", "model.encoder_layers", "model.decoder_layers"),
        *("model.heads", "model.feed_forward", "model.dropout", "model.init_std", "model.copying"),
    ),
    bests={"ce": False, "loss": False},
    settable=(*recipe.affecting("documents"), "data.max_source", "data.language"),
    takes_objective=True,
    search=("num_beams", "min_length", "max_length"),
)

BERTSUM_ABS = System(
    "BertSumAbs, and with the encoder of a bertsum_ext run BertSumExtAbs (Liu and Lapata 2019): an encoder, a new "
    "decoder and two learning rates; any objective",
    ("bertsum-abs", "bertsum-abs-demo"),
    first={"model.encoder": "{bertsum_ext}/model"},
    beyond_cnndm=(
        "data.max_target=100",
        "generation.min_length=20",
        "generation.max_length=100",
        "generation.length_penalty=0.9",
    ),
)

FES = System(
    "FES (Chen et al. 2022), its margin alone: the term margin, which reads a language model of the targets; the "
    "questions and the coverage of entities are left out, because the graphs that they read were not released",
    ("fes", "fes-demo"),
    first={"data.language_model": "{lm}"},
)

PROPHETNET = System(
    "ProphetNet (Qi et al. 2020): a ProphetNet with the term future, trained on all of its streams",
    ("prophetnet", "prophetnet-demo"),
)

GSUM = System(
    "GSum (Dou et al. 2021): a BART that reads a guidance beside the document, such as sentences of it; any objective",
    ("gsum", "gsum-demo"),
    "ngramloss_systems.gsum",
    options={
        "guidance": Setting("guidance", help="the column with the guidance, or oracle, which makes it in training"),
        "extractor": Setting("", help="a run of bertsum_ext, whose summaries are the guidance in generate"),
        "sentences": Setting(3, least=1, most=1000, help="most sentences that the oracle takes"),
    },
    after="ngramloss generate {run} --set 'system=\"gsum(extractor=EXTRACTOR)\"', with a run of bertsum_ext",
    not_used=("data.prefix", "data.candidates"),
    bests={"loss": False},
    takes_objective=True,
    search=tuple(field.name for field in fields(recipe.Generation)),
    options_in_generate=("guidance", "extractor", "sentences"),
    first={"system.extractor": "{bertsum_ext}"},
    task="summarisation",
)

PARALLEL = System(
    "Parallel decoder (Gu et al. 2018): an encoder-decoder that predicts all tokens of a text at once; any objective",
    ("parallel", "parallel-demo"),
    "ngramloss_systems.parallel",
    options={
        "inputs": Setting(
            "copy", choices=("copy", "mask", "random"), help="what the decoder reads; random: for passes"
        ),
        "spread": Setting(24, least=1, most=1000, help="how far a length may be from the usual one, in tokens"),
        "length_weight": Setting(0.1, least=0, most=1000, help="weight of the length head's cross-entropy"),
        "targets": Setting("", help="a folder of generate with texts of the training split, which replace its targets"),
        "lengths": Setting(5, least=1, most=1000, help="most probable lengths that are tried for a text"),
        "passes": Setting(1, least=1, most=1000, help="times that the least certain tokens are predicted, all at once"),
        "remove_repeats": Setting(True, help="leave out a token that is equal to the one before it"),
        "length_offset": Setting(0, least=-1000, most=1000, help="tokens added to each length that is tried"),
    },
    not_used=("data.prompt", "data.candidates"),
    bests={"score": True, "loss": False},
    takes_objective=True,
    search=("engine", "precision"),
    options_in_generate=("lengths", "passes", "remove_repeats", "length_offset"),
    loads=True,
)

DRAFTER = System(
    "Drafter (after Cai et al. 2024): a small file with which a trained model writes the same texts in fewer passes; "
    "any objective of tokens and n-grams, such as accept(8)",
    ("drafter", "drafter-demo"),
    "ngramloss_systems.drafter",
    options={
        "places": Setting(8, least=1, most=64, help="tokens of a draft"),
        "layers": Setting(2, least=1, most=8, help="layers over the places"),
        "feed_forward": Setting(0, least=0, most=2**20, help="width inside these layers; 0: 4 times the model's"),
        "anchors": Setting(4, least=1, most=1024, help="random blocks of each text in a step"),
        "shortlist": Setting(8192, least=1, most=2**24, help="frequent tokens of the targets, which may be drafted"),
        "targets": Setting("", help="a folder of generate with the model's own texts of the training split"),
    },
    after="ngramloss generate MODEL --engine draft --set generation.drafter={run}",
    not_used=(
        *("data.candidates", "model.architecture", "model.width", "model.encoder_layers", "model.decoder_layers"),
        *("model.heads", "model.feed_forward", "model.dropout", "model.vocabulary", "model.init_std", "model.copying"),
    ),
    bests={"accepted": True, "loss": False},
    takes_objective=True,
    writes=False,
)
