"""Every objective again, in the dumbest Python that can express it.

A probability is ``p[t][v]``, a 0-d fp64 tensor, so that autograd gives the oracle's own gradient. Labels are a
list with −100 where they do not count. Written from Algorithms 1 and 2 and the equations; nothing is shared with
the library.
"""

from collections import Counter
from math import log, prod


def windows(labels, n):
    """Start of each window that is real."""
    return [t for t in range(len(labels) - n + 1) if all(labels[t + i] != -100 for i in range(n))]


def best(p):
    """The most probable id of each position, and its probability."""
    ids = [max(range(len(row)), key=lambda v: row[v].item()) for row in p]
    return ids, [row[v] for row, v in zip(p, ids, strict=True)]


def gram(ids, t, n):
    return tuple(ids[t : t + n])


def ce(p, labels, smoothing=0.0, temperature=1.0):
    """``p`` are the probabilities without temperature."""
    total = 0.0 * p[0][0]
    for row, label in zip(p, labels, strict=True):
        if label != -100:
            V, powers = len(row), [x ** (1 / temperature) for x in row]
            row = [x / sum(powers) for x in powers]
            cost = -(1 - smoothing) * row[label].log() - smoothing * sum(x.log() for x in row) / V
            total = total + temperature * cost
    return total


def rewards(p, labels, n):
    """Algorithm 1."""
    spans, (ids, q) = windows(labels, n), best(p)
    loss, kept = 1 + 0.0 * p[0][0], {}
    for t in spans:
        v = kept.setdefault(gram(labels, t, n), [])
        if gram(ids, t, n) == gram(labels, t, n):
            v.append(prod(q[t : t + n]))
    for v in kept.values():
        for probability in v:
            loss = loss - 1 / len(spans) / len(v) * probability
    return loss


def matches(p, labels, n, most=None):
    """Algorithm 2; with ``most``, as in the released code for n of 3 or more."""
    spans, (ids, q) = windows(labels, n), best(p)
    loss, kept = 1 + 0.0 * p[0][0], {gram(labels, t, n): [] for t in spans}
    for t in spans:
        v = kept.get(gram(ids, t, n))
        if v is not None and (most is None or len(v) < most):
            v.append(prod(q[t : t + n]))
    for v in kept.values():
        for probability in v:
            loss = loss - 1 / len(spans) / len(v) * probability
    return loss


def matches_released(p, labels, n):
    return matches(p, labels, n, most=3 if n >= 3 else None)


def precision(p, labels, n, last_only=False):
    spans, (ids, q) = windows(labels, n), best(p)
    zero = 0.0 * p[0][0]
    if not spans:
        return zero
    reference = Counter(gram(labels, t, n) for t in spans)
    counts, everything = {}, zero
    for t in spans:
        g, probability = gram(ids, t, n), prod(q[t : t + n])
        counts[g] = probability if last_only else counts.get(g, zero) + probability
        everything = everything + probability
    matched = zero
    for g, expected in counts.items():
        matched = matched + (expected if expected.item() < reference[g] else zero + reference[g])
    return -matched / everything


def precision_released(p, labels, n):
    return precision(p, labels, n, last_only=True)


def expected_count(p, spans, g):
    return sum((prod(p[t + i][g[i]] for i in range(len(g))) for t in spans), 0.0 * p[0][0])


def overlap(p, labels, n):
    """Σ_g min(B(g), C(g)) over the distinct n-grams of the reference."""
    spans = windows(labels, n)
    total = 0.0 * p[0][0]
    for g, count in Counter(gram(labels, t, n) for t in spans).items():
        b = expected_count(p, spans, g)
        total = total + (b if b.item() < count else 0.0 * b + count)
    return total


def bag(p, labels, n):
    W = len(windows(labels, n))
    return (2 * W - overlap(p, labels, n)) / (2 * W) if W else 1 + 0.0 * p[0][0]


def bag_original(p, labels, n):
    W = len(windows(labels, n))
    return 1 - overlap(p, labels, n) / W if W else 1 + 0.0 * p[0][0]


def bag_released(p, labels, n):
    spans = windows(labels, n)
    if not spans:
        return 1 + 0.0 * p[0][0]
    total = 0.0 * p[0][0]
    for u in spans:
        b = expected_count(p, spans, gram(labels, u, n))
        total = total + (b if b.item() < 1 else 0.0 * b + 1)
    return -total / len(spans)


def bleu(p, labels, n):
    logs = []
    for order in n:
        spans = windows(labels, order)
        if not spans:
            continue
        total = 0.0 * p[0][0]
        for g, count in Counter(gram(labels, t, order) for t in spans).items():
            P = {t: prod(p[t + i][g[i]] for i in range(order)) for t in spans}
            for t in spans:
                cap = count / (1 + sum((P[s] for s in spans if s != t), 0.0 * p[0][0]))
                total = total + P[t] * (cap if cap.item() < 1 else 1.0)
        share = total / len(spans)
        logs.append(share.log() if share.item() > 1e-12 else (0.0 * share + 1e-12).log())
    return -(sum(logs) / len(logs)).exp() if logs else 0.0 * p[0][0]


def lcs(p, labels):
    spans = windows(labels, 1)
    T, zero = len(spans), 0.0 * p[0][0]
    S = [[zero] * (T + 1) for _ in range(T + 1)]
    for i in range(1, T + 1):
        for j in range(1, T + 1):
            x = p[spans[i - 1]][labels[spans[j - 1]]]
            longer = S[i - 1][j] if S[i - 1][j].item() > S[i][j - 1].item() else S[i][j - 1]
            S[i][j] = x * (S[i - 1][j - 1] + 1) + (1 - x) * longer
    return -(S[T][T] / T).log() if T else zero


def eisl(p, labels, n):
    spans = windows(labels, n)
    total = 0.0 * p[0][0]
    for u in spans:
        A = [sum(p[t + i][labels[u + i]].log() for i in range(n)) / n for t in spans]
        weights = [a.exp() for a in A]
        for a, w in zip(A, weights, strict=True):
            total = total - w / sum(weights) * a
    return total / max(len(spans), 1)


def soft(p, labels, n, kappa=None):
    spans = windows(labels, n)
    loss = 1 + 0.0 * p[0][0]
    for t in spans:
        mean = prod(p[t + i][labels[t + i]] for i in range(n)) ** (1 / n)
        loss = loss - mean ** (n if kappa is None else kappa) / len(spans)
    return loss


def gated(p, labels, n):
    spans, (ids, q) = windows(labels, n), best(p)
    loss = 1 + 0.0 * p[0][0]
    for t in spans:
        if gram(ids, t, n) == gram(labels, t, n):
            loss = loss - prod(q[t : t + n]) / len(spans)
    return loss


def near(p, labels, n, power=4):
    spans, (_, q) = windows(labels, n), best(p)
    loss = 1 + 0.0 * p[0][0]
    for t in spans:
        weight = prod((p[t + i][labels[t + i]].item() / q[t + i].item()) ** power for i in range(n))
        loss = loss - weight * prod(p[t + i][labels[t + i]] for i in range(n)) / len(spans)
    return loss


def block_from(labels, t, n):
    places = []
    while t < len(labels) and labels[t] != -100 and len(places) < n:
        places.append(t)
        t += 1
    return places


def blocks(labels, n, anchors=None):
    """The places of each block."""
    if anchors is not None:
        return [block_from(labels, t, n) for t in range(len(labels)) if anchors[t] and labels[t] != -100]
    found, t = [], 0
    while t < len(labels):
        places = block_from(labels, t, n)
        found += [places] if places else []
        t += max(len(places), 1)
    return found


def accept(p, labels, n, anchors=None):
    found = blocks(labels, n, anchors)
    loss = 1 + 0.0 * p[0][0]
    for places in found:
        for m in range(1, len(places) + 1):
            loss = loss - prod(p[t][labels[t]] for t in places[:m]) / len(places) / len(found)
    return loss


def accept_detached(p, labels, n, alpha=0.5, anchors=None):
    """The weights are plain numbers."""
    found, loss = blocks(labels, n, anchors), 0.0 * p[0][0]
    for places in found:
        smoothed = [(1 - alpha) * p[t][labels[t]].item() + alpha for t in places]
        for j, t in enumerate(places, 1):
            weight = sum(prod(smoothed[:m]) for m in range(j, len(places) + 1))
            loss = loss - weight * p[t][labels[t]].log() / len(places) / len(found)
    return loss


def accept_gated(p, labels, n, anchors=None):
    found, (ids, _) = blocks(labels, n, anchors), best(p)
    loss = 0.0 * p[0][0]
    for places in found:
        for t in places:
            loss = loss - p[t][labels[t]].log() / len(places) / len(found)
            if ids[t] != labels[t]:
                break
    return loss


def convex(p, labels, order=1):
    spans = windows(labels, 1)
    return -len(spans) * prod((p[t][labels[t]] for t in spans), start=1 + 0.0 * p[0][0]) ** (order / len(spans))


def weighted(p, labels, weight):
    """Cross-entropy with a weight for each token, a function of its probability as a plain number."""
    return sum((-weight(p[t][labels[t]].item()) * p[t][labels[t]].log() for t in windows(labels, 1)), 0.0 * p[0][0])


def dft(p, labels):
    return weighted(p, labels, lambda x: x)


def tailr(p, labels, gamma=0.8, min_weight=0.2):
    return weighted(p, labels, lambda x: min(max(x / (gamma + (1 - gamma) * x), min_weight), 1))


def mixce(p, labels, eta=0.5):
    return weighted(p, labels, lambda x: eta + (1 - eta) * x)


def unlikelihood(p, labels):
    total, seen = 0.0 * p[0][0], set()
    for row, label in zip(p, labels, strict=True):
        if label != -100:
            for c in seen - {label}:
                total = total - (1 - row[c]).clamp_min(1e-5).log()
            seen.add(label)
    return total


LOG_20 = log(20)


def eaft(p, labels, alpha=1.0, most=None, unit=LOG_20):
    """The weight is a plain number, so it has no gradient; with ``most``, only that many tokens count."""
    total = 0.0 * p[0][0]
    for row, label in zip(p, labels, strict=True):
        if label != -100:
            chosen = sorted((x.item() for x in row), reverse=True)[:most]
            shares = [x / sum(chosen) for x in chosen]
            entropy = -sum(x * log(x) for x in shares if x > 0)
            total = total - (entropy / unit) ** alpha * row[label].log()
    return total


def eaft_released(p, labels, alpha=1.0):
    return eaft(p, labels, alpha, most=20, unit=3)


def language_model(label):
    """A language model that knows nothing but the token itself."""
    return (label + 1) / 8


def margin(p, labels, power=5):
    total = 0.0 * p[0][0]
    for row, label in zip(p, labels, strict=True):
        if label != -100:
            gap = row[label] - language_model(label)
            size = gap if gap.item() > 0 else -gap
            total = total + (1 - row[label]) * (1 - size**power * (1 if gap.item() > 0 else -1)) / 2
    return total


def future(p, labels, smoothing=0.0):
    """The further stream is less sure than the first: its logits are half as large."""
    roots = [[x**0.5 for x in row] for row in p]
    return ce([[x / sum(row) for x in row] for row in roots], labels, smoothing)


def by_score(score, length):
    """Places of the candidates, the best first; those that tie stay in their order, absent ones are left out."""
    return sorted((k for k in range(len(score)) if length[k]), key=lambda k: -score[k])


def rank(logp, length, score, margin=0.001, alpha=2.0):
    f = [logp[k] / length[k] ** alpha for k in by_score(score, length)]
    total = 0.0 * sum(logp)
    for d in range(1, len(f)):
        hinges = [f[i + d] - f[i] + d * margin for i in range(len(f) - d)]
        total = total + sum((x for x in hinges if x.item() > 0), 0.0) / len(hinges)
    return total


def risk(logp, length, score, sharpness=0.005):
    present = by_score(score, length)
    mass = {k: (sharpness * logp[k]).exp() for k in present}
    return sum((mass[k] / sum(mass.values()) * (1 - score[k]) for k in present), 0.0 * sum(logp))


def prefer(logp, length, score, beta=0.1, alpha=0.0, margin=0.0):
    present = by_score(score, length)
    if len(present) < 2:
        return 0.0 * sum(logp)
    best, worst = (logp[k] / length[k] ** alpha for k in (present[0], present[-1]))
    return (1 + (margin - beta * (best - worst)).exp()).log()


def policy(logp, length, score, baseline="mean", scale="none", alpha=0.0, greedy=0.0):
    total, present = 0.0 * sum(logp), by_score(score, length)
    for k in present:
        others = [score[j] for j in present if j != k]
        mean = sum(score[j] for j in present) / len(present)
        against = {"mean": mean, "others": sum(others) / len(others) if others else score[k], "greedy": greedy}
        advantage = score[k] - against[baseline]
        if scale == "std":
            deviation = (sum((score[j] - mean) ** 2 for j in present) / len(present)) ** 0.5
            advantage = advantage / (deviation + 1e-6) if len({score[j] for j in present}) > 1 else 0.0
        total = total - advantage * logp[k] / length[k] ** alpha / len(present)
    return total


def credit(samples, logp, labels, n):
    """Samples are lists of ids, and ``logp[k][t]`` is that of token t of sample k. One without ids is absent."""

    def credited(text, t, m):
        g = gram(text, t, m)
        before = sum(gram(text, s, m) == g for s in windows(text, m) if s < t)
        return before < sum(gram(labels, u, m) == g for u in windows(labels, m))

    present = [k for k, text in enumerate(samples) if windows(text, 1)]
    credits = {}
    for k in present:
        for t in windows(samples[k], 1):
            over = [(s, m) for m in n for s in windows(samples[k], m) if s <= t < s + m]
            credits[k, t] = sum(credited(samples[k], s, m) for s, m in over) / len(over) if over else 0.0
    share = {(k, t): 1 / len(present) / len(windows(samples[k], 1)) for k, t in credits}
    mean = sum(credits[at] * share[at] for at in credits)
    return sum((-(credits[k, t] - mean) * share[k, t] * logp[k][t] for k, t in credits), 0.0 * logp[0][0])


def matches_student(own, p, labels, n):
    """``p[t][v]`` is at position t of the own text."""
    spans, wanted = windows(own, n), [gram(labels, u, n) for u in windows(labels, n)]
    copies, total = Counter(gram(own, t, n) for t in spans), 0.0 * p[0][0]
    for t in spans:
        if gram(own, t, n) in wanted:
            total = total + prod(p[t + i][own[t + i]] for i in range(n)) / copies[gram(own, t, n)]
    return 1 - total / max(len(spans), len(wanted), 1)


def precision_student(own, p, labels, n):
    counts = Counter(gram(labels, u, n) for u in windows(labels, n))
    expected = {}
    for t in windows(own, n):
        product = prod(p[t + i][own[t + i]] for i in range(n))
        expected[gram(own, t, n)] = expected.get(gram(own, t, n), 0.0) + product
    if not expected:
        return 0.0 * p[0][0]
    clipped = sum(x if x.item() < counts[g] else 0.0 * x + counts[g] for g, x in expected.items())
    return -clipped / sum(expected.values())


def bag_student(own, p, labels, n):
    spans, counts = windows(own, n), Counter(gram(labels, u, n) for u in windows(labels, n))
    total, every = 0.0 * p[0][0], len(spans) + counts.total()
    for g, count in counts.items():
        expected = sum((prod(p[t + i][g[i]] for i in range(n)) for t in spans), 0.0 * p[0][0])
        total = total + (expected if expected.item() < count else 0.0 * expected + count)
    return (every - 2 * total) / every if every else 1 - total


def focal(p, labels, gamma=2.0):
    """The gradient goes through both factors."""
    return sum((-((1 - p[t][labels[t]]) ** gamma) * p[t][labels[t]].log() for t in windows(labels, 1)), 0.0 * p[0][0])


# Weights of tokens


def earned(name, p, labels, n, most=None, kappa=None, power=4):
    """What each window earns, before it is divided by the number of windows."""
    spans, (ids, q) = windows(labels, n), best(p)
    found, zero = {}, 0.0 * p[0][0]
    if name in ("matches", "rewards"):
        hits = {}
        for t in spans:
            is_there = any(gram(ids, t, n) == gram(labels, u, n) for u in (spans if name == "matches" else [t]))
            if is_there and (most is None or len(hits.get(gram(ids, t, n), [])) < most):
                hits.setdefault(gram(ids, t, n), []).append(t)
        for places in hits.values():
            found |= {t: prod(q[t : t + n]) / len(places) for t in places}
    for t in spans if name in ("gated", "soft", "near") else []:
        probability = prod(p[t + i][labels[t + i]] for i in range(n))
        if name == "gated":
            found[t] = prod(q[t : t + n]) if gram(ids, t, n) == gram(labels, t, n) else zero
        elif name == "soft":
            found[t] = probability ** ((n if kappa is None else kappa) / n)
        else:
            found[t] = probability * prod((p[t + i][labels[t + i]] / q[t + i]).item() ** power for i in range(n))
    return [found.get(t, zero) for t in spans]


def weighted_windows(name, p, labels, weights, n, **options):
    """(1/W) Σ_s w_s (1 − r_s); the mean weight of the tokens if there is no window."""
    spans, zero = windows(labels, n), 0.0 * p[0][0]
    if not spans:
        own = [weights[t] for t in windows(labels, 1)]
        return zero + sum(own) / len(own)
    total = zero
    for t, reward in zip(spans, earned(name, p, labels, n, **options), strict=True):
        total = total + sum(weights[t : t + n]) / n * (1 - reward)
    return total / len(spans)


def weighted_tokens(function, p, labels, weights):
    """Σ_t w_t times what token t adds: the value of the labels up to it, less that of those before it."""
    total = 0.0 * p[0][0]
    for t in windows(labels, 1):
        until, before = ([*labels[:end], *[-100] * (len(labels) - end)] for end in (t + 1, t))
        total = total + weights[t] * (function(p, until) - function(p, before))
    return total


# Twins and teachers


def rdrop(p, q, labels):
    """Of a row and its twin: ½ (KL(p‖q) + KL(q‖p)) at each label."""
    total = 0.0 * p[0][0]
    for own, twin, label in zip(p, q, labels, strict=True):
        if label != -100:
            forth = sum(a * (a.log() - b.log()) for a, b in zip(own, twin, strict=True))
            back = sum(b * (b.log() - a.log()) for a, b in zip(own, twin, strict=True))
            total = total + (forth + back) / 2
    return total


def rewards_twin(p, q, labels, n):
    """The windows that the twin's best tokens get right earn this row's probability of the labels."""
    spans, (ids, _) = windows(labels, n), best(q)
    hits = [t for t in spans if gram(ids, t, n) == gram(labels, t, n)]
    copies = Counter(gram(labels, t, n) for t in hits)
    loss = 1 + 0.0 * p[0][0]
    for t in hits:
        earned = prod(p[t + i][labels[t + i]] for i in range(n))
        loss = loss - earned / copies[gram(labels, t, n)] / len(spans)
    return loss


def gated_twin(p, q, labels, n):
    spans, (ids, _) = windows(labels, n), best(q)
    loss = 1 + 0.0 * p[0][0]
    for t in spans:
        if gram(ids, t, n) == gram(labels, t, n):
            loss = loss - prod(p[t + i][labels[t + i]] for i in range(n)) / len(spans)
    return loss


def distill(p, q, labels, temperature=1.0):
    """τ² Σ KL(q‖p), the teacher first; ``p`` and ``q`` are the probabilities without temperature."""
    total = 0.0 * p[0][0]
    for row, other, label in zip(p, q, labels, strict=True):
        if label != -100:
            own, given = ([x ** (1 / temperature) for x in one] for one in (row, other))
            own, given = ([x / sum(one) for x in one] for one in (own, given))
            total = total + temperature**2 * sum(b * (b.log() - a.log()) for a, b in zip(own, given, strict=True))
    return total


def keep_reverse(p, q, labels):
    return distill(q, p, labels) + 0.0 * p[0][0]
