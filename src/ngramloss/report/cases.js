// The case explorer: a list of all cases, of which only the rows in view exist; one case with shared n-grams marked.

const ROW = 60;          // height of a row in the list, as in the style sheet
const WORD = /[\p{L}\p{N}]+/gu;
const JOIN = "\u0001";   // between words of an n-gram; no word has it

/** The words of a text, lower-cased, with where they stand. */
function words(text) {
  return [...text.matchAll(WORD)].map((match) => ({ word: match[0].toLowerCase(), start: match.index, end: match.index + match[0].length }));
}

/** The n-grams of a text by position; none if it is shorter than n. */
function ngrams(list, n) {
  const grams = [];
  for (let start = 0; start + n <= list.length; start++) {
    grams.push(list.slice(start, start + n).map((item) => item.word).join(JOIN));
  }
  return grams;
}

/** Which case, of which systems and in which order: all that a link keeps. */
const state = { case: "", n: 2, a: facts.pair[0], b: facts.pair[1], figure: 0, measure: "difference", up: false, least: "", most: "", q: "" };
let ids = [];
let order = [];          // numbers of the cases that are listed
let values = new Map();  // number → what the list is ordered by
let places = new Map();  // number of a case → index of its document
let current = -1;

async function textsOf(number) {
  const block = await unpacked(`texts-${Math.floor(number / facts.block)}`);
  return block[number % facts.block];
}

async function documentOf(number) {
  const index = places.get(number);
  if (index === undefined) return null;
  const { starts } = facts.documents;
  const block = starts.filter((start) => start <= index).length - 1;
  return (await unpacked(`document-${block}`))[index - starts[block]];
}

/** The scores that can be chosen; the reference's length is no score of a system. */
function scoreChoices() {
  return facts.figures.map((figure, index) => [index, figure.label]).filter(([index]) => facts.figures[index].name !== "reference words");
}

const scoreIndex = (name) => facts.figures.findIndex((figure) => figure.name === name);

/** What cases can be ordered by: name → label and a function of the case's number. */
function measures() {
  const a = facts.systems[state.a].label;
  const b = facts.systems[state.b].label;
  const chosen = facts.figures[state.figure];
  const of = (name, system) => async () => {
    const value = await scoreValues(scoreIndex(name));
    return (number) => value(number, system);
  };
  const list = {
    difference: [`${chosen.label}: B − A`, async () => {
      const value = await scoreValues(state.figure);
      return (number) => value(number, state.b) - value(number, state.a);
    }],
    a: [`${chosen.label} of A`, of(chosen.name, state.a)],
    b: [`${chosen.label} of B`, of(chosen.name, state.b)],
    length: ["length of A, words", of("words", state.a)],
    reference: ["length of the reference, words", of("reference words", 0)],
  };
  if (scoreIndex("novel2") >= 0) list.novelty = ["novelty of A, % new bigrams", of("novel2", state.a)];
  list.given = ["the order given", async () => (number) => number + 1];
  if (facts.systems.length < 2) { delete list.difference; delete list.b; }
  return { list, a, b };
}

let asked = 0;

/** Filter and sort, and show the list from its top. A newer request cancels an older one. */
async function arrange({ keep = false } = {}) {
  const mine = ++asked;
  const { list } = measures();
  if (!(state.measure in list)) state.measure = Object.keys(list)[0];
  const value = await list[state.measure][1]();
  const least = state.least === "" ? -Infinity : +state.least;
  const most = state.most === "" ? Infinity : +state.most;
  let numbers = ids.map((_, number) => number);
  if (state.q.trim()) numbers = await matching(state.q.trim().toLowerCase(), mine);
  if (mine !== asked) return;
  const bounded = state.least !== "" || state.most !== "";
  values = new Map(numbers.map((number) => [number, value(number)]));
  numbers = numbers.filter((number) => !bounded || (values.get(number) >= least && values.get(number) <= most));
  const sign = state.up || state.measure === "given" ? 1 : -1;
  const rank = (number) => Number.isNaN(values.get(number)) ? -Infinity : sign * -values.get(number);
  order = numbers.sort((x, y) => rank(y) - rank(x) || x - y);
  at("found").textContent = order.length === ids.length ? `${ids.length.toLocaleString("en")} cases` :
    `${order.length.toLocaleString("en")} of ${ids.length.toLocaleString("en")} cases`;
  at("rows").style.height = `${order.length * ROW}px`;
  if (!keep) at("list").scrollTop = 0;
  listRows();
  if (order.length && (current < 0 || !values.has(current) || !keep)) await open(order[0], { silent: true });
}

/** Numbers of the cases in which a text, a reference, the document or the id has the words. */
async function matching(query, mine) {
  const hits = new Set();
  ids.forEach((id, number) => { if (id.toLowerCase().includes(query)) hits.add(number); });
  const parts = Math.ceil(ids.length / facts.block);
  for (let part = 0; part < parts; part++) {
    const block = await unpacked(`texts-${part}`);
    if (mine !== asked) return [];
    block.forEach(([references, texts], index) => {
      const has = (text) => text.toLowerCase().includes(query);
      if (references.some(has) || texts.some(has)) hits.add(part * facts.block + index);
    });
    at("found").textContent = `searching… ${Math.round(100 * part / parts)}%`;
  }
  const numbers = [...places.keys()];
  for (let part = 0; part < facts.documents.starts.length; part++) {
    (await unpacked(`document-${part}`)).forEach((text, index) => {
      if (text.toLowerCase().includes(query)) hits.add(numbers[facts.documents.starts[part] + index]);
    });
    if (mine !== asked) return [];
  }
  return [...hits].sort((x, y) => x - y);
}

const visibleRows = new Map();   // index in the list → row

function listRows() {
  const list = at("list");
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 3);
  const last = Math.min(order.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + 3);
  for (const [index, row] of visibleRows) if (index < first || index >= last || +row.dataset.number !== order[index]) {
    row.remove();
    visibleRows.delete(index);
  }
  for (let index = first; index < last; index++) if (!visibleRows.has(index)) visibleRows.set(index, listRow(index));
  for (const [index, row] of visibleRows) {
    const value = row.querySelector(".value");
    const amount = values.get(order[index]);
    const { lower, ranks, digits } = facts.figures[state.figure];
    const ofScore = ["difference", "a", "b"].includes(state.measure);
    value.textContent = shown(amount, { signed: state.measure === "difference", digits: ofScore ? digits : 2 });
    const better = state.measure === "difference" && ranks && amount ? (amount > 0) !== lower : null;
    value.className = better === null ? "value" : better ? "value up" : "value down";
    row.setAttribute("aria-selected", order[index] === current);
  }
}

function listRow(index) {
  const number = order[index];
  const snippet = element("div", { class: "snippet", dir: "auto" });
  const row = element("div", { class: "row", role: "option", id: `row-${number}` },
    element("div", { class: "top" }, element("bdi", { textContent: ids[number] }), element("span", { class: "value" })), snippet);
  row.dataset.number = number;
  row.style.top = `${index * ROW}px`;
  row.addEventListener("click", () => open(number));
  textsOf(number).then(([references]) => { snippet.textContent = (references[0] || "").slice(0, 160); });
  at("rows").append(row);
  return row;
}

const roleOf = (system) => facts.systems.length < 2 ? "" : system === state.a ? "A" : system === state.b ? "B" : "";

/** Show a case. */
async function open(number, { silent = false } = {}) {
  current = number;
  state.case = ids[number];
  const [[references, texts], source, scores] = await Promise.all([
    textsOf(number), documentOf(number), Promise.all(facts.figures.map((_, index) => scoreValues(index))),
  ]);
  if (current !== number) return;
  at("case-title").replaceChildren("Case ", element("bdi", { textContent: ids[number] }));
  const { label, digits } = facts.figures[state.figure];
  const scoreText = (system) => `${label} ${shown(scores[state.figure](number, system), { digits })}`;
  shownCase = {
    number,
    texts: [
      ...references.map((text, index) => ({ text, kind: "reference", title: references.length > 1 ? `Reference ${index + 1}` : "Reference" })),
      ...texts.map((text, system) => ({ text, kind: "system", title: facts.systems[system].label, scores: scoreText(system), role: roleOf(system) }))
        .sort((item, other) => (item.role || "C").localeCompare(other.role || "C")),   // A and B side by side
      ...(source === null ? [] : [{ text: source, kind: "document", title: "Document" }]),
    ],
  };
  drawCase();
  drawScores(number, scores);
  await drawSeen();
  listRows();
  reveal();
  if (!silent) keepLink();
}

let shownCase = null;
let occurrences = new Map();   // n-gram → words' elements, one list for each occurrence

/** Mark the n-grams that texts share with a reference. Words of references are the darker, the more systems have them. */
function drawCase() {
  if (!shownCase) return;
  const n = state.n;
  const read = shownCase.texts.map((item) => ({ ...item, list: words(item.text) }));
  read.forEach((item) => { item.grams = ngrams(item.list, n); });
  const gold = new Set(read.filter((item) => item.kind === "reference").flatMap((item) => item.grams));
  const systems = read.filter((item) => item.kind === "system");
  const count = new Map();
  for (const item of systems) for (const gram of new Set(item.grams)) count.set(gram, (count.get(gram) || 0) + 1);
  const source = new Set(read.filter((item) => item.kind === "document").flatMap((item) => item.grams));
  occurrences = new Map();
  const cards = read.map((item) => {
    const weight = (gram) => item.kind !== "reference" ? (gold.has(gram) ? 1 : 0) :
      count.has(gram) ? (count.get(gram) === systems.length ? 3 : count.get(gram) * 2 > systems.length ? 2 : 1) : source.has(gram) && !systems.length ? 1 : 0;
    const body = element("p", { class: "body", dir: "auto" });
    marked(body, item, n, weight);
    const scores = item.scores ? element("span", { class: "scores", textContent: item.scores }) : "";
    const title = element("span", {}, element("bdi", { textContent: item.title }), item.role ? element("span", { class: `role ${item.role}`, textContent: item.role }) : "");
    return element("div", { class: `text ${item.kind}${item.kind === "system" ? "" : " whole"}` }, element("h4", {}, title, scores), body);
  });
  at("texts").replaceChildren(...cards);
}

/** A text in runs of marked words; each marked word knows the n-grams it is part of. */
function marked(body, { text, list, grams }, n, weight) {
  const level = list.map(() => 0);
  const own = list.map(() => []);
  grams.forEach((gram, start) => {
    const heavy = weight(gram);
    if (heavy) for (let index = start; index < start + n; index++) {
      level[index] = Math.max(level[index], heavy);
      own[index].push({ gram, start });
    }
  });
  const spans = [];
  let done = 0;
  let run = null;
  list.forEach((item, index) => {
    const between = text.slice(done, item.start);
    const joined = run && level[index] === run.level && level[index] && own[index].some(({ start }) => start < index);
    (joined ? run.mark : body).append(between);
    if (!level[index]) { body.append(text.slice(item.start, item.end)); run = null; }
    else {
      if (!joined) {
        run = { level: level[index], mark: element("mark", { tabIndex: 0, class: ["", "", "medium", "strong"][level[index]] }) };
        body.append(run.mark);
      }
      spans[index] = element("span", { textContent: text.slice(item.start, item.end) });
      spans[index].grams = own[index].map(({ gram }) => gram);
      run.mark.append(spans[index]);
    }
    done = item.end;
  });
  body.append(text.slice(done));
  grams.forEach((gram, start) => {
    if (!weight(gram)) return;
    if (!occurrences.has(gram)) occurrences.set(gram, []);
    occurrences.get(gram).push(spans.slice(start, start + n));
  });
}

function light(grams) {
  at("texts").querySelectorAll(".lit").forEach((span) => span.classList.remove("lit"));
  for (const gram of grams) for (const span of (occurrences.get(gram) || []).flat()) span.classList.add("lit");
}

/** A table of all that is known of this case in numbers. */
function drawScores(number, scores) {
  const choices = scoreChoices();
  const head = element("tr", {}, element("th", { scope: "col", textContent: "System" }),
    ...choices.map(([, label]) => element("th", { scope: "col", class: "number", textContent: label })));
  const rows = facts.systems.map(({ label }, system) => element("tr", {}, element("th", { scope: "row" }, element("bdi", { textContent: label })),
    ...choices.map(([index]) => element("td", { class: "number", textContent: shown(scores[index](number, system), { digits: facts.figures[index].digits }) }))));
  at("case-figures").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
}

/** What the objective saw: reference tokens, the model's best token under each, and the windows of n that earned. */
async function drawSeen() {
  const parts = [];
  for (const [index, name] of facts.seen.entries()) {
    const case_ = (await unpacked(`seen-${index}`))[ids[current]];
    if (case_) parts.push(seenBy(name, case_));
  }
  if (!parts.length) { at("seen").replaceChildren(); return; }
  const key = (kind, text) => element("span", {}, element("i", { class: kind }), text);
  at("seen").replaceChildren(
    element("h3", { textContent: "What the objective saw" }),
    element("p", { class: "keys" }, "Above, the reference; below, the most probable token, the darker the surer. ",
      key("free", `matches(${state.n}): its window is in the reference, anywhere`), key("bound", `rewards(${state.n}): in this very place`)),
    ...parts);
}

function seenBy(name, { tokens, best, confidence, label_probability: probability }) {
  const n = state.n;
  const windows = (list) => list.map((_, start) => start + n <= list.length ? list.slice(start, start + n).join(JOIN) : null);
  const gold = windows(tokens);
  const there = new Set(gold.filter((item) => item !== null));
  const free = tokens.map(() => false);
  const bound = tokens.map(() => false);
  windows(best).forEach((window, start) => {
    if (window === null) return;
    for (let index = start; index < start + n; index++) {
      if (there.has(window)) free[index] = true;
      if (window === gold[start]) bound[index] = true;
    }
  });
  const line = element("div", { class: "saw" }, ...tokens.map((token, index) => {
    const sure = Math.round(100 * (confidence[index] ?? 0));
    const under = element("span", { class: token === best[index] ? "best-token" : "best-token wrong", textContent: best[index] });
    under.style.background = `color-mix(in srgb, var(--accent) ${Math.round(sure * 0.45)}%, transparent)`;
    const cell = element("span", { class: "token" }, element("span", { textContent: token }), under,
      element("span", { class: free[index] ? "free on" : "free" }), element("span", { class: bound[index] ? "bound on" : "bound" }));
    const label = probability && probability[index] !== null ? `; the reference’s token ${Math.round(100 * probability[index])}%` : "";
    cell.title = `${best[index]} ${sure}%${label}`;
    return cell;
  }));
  const objective = facts.objectives[name];
  const label = facts.systems.find((system) => system.name === name)?.label || name;
  const title = element("h4", {}, element("span", {}, element("bdi", { textContent: label }), objective && objective !== label ? element("small", { textContent: ` ${objective}` }) : ""));
  return element("div", { class: "text whole" }, title, line);
}

/** The selected row is in view, and the buttons know whether there is another. */
function reveal() {
  const index = order.indexOf(current);
  at("previous").disabled = index <= 0;
  at("next").disabled = index < 0 || index >= order.length - 1;
  at("list").setAttribute("aria-activedescendant", `row-${current}`);
  const list = at("list");
  if (index >= 0 && (index * ROW < list.scrollTop || (index + 1) * ROW > list.scrollTop + list.clientHeight)) {
    list.scrollTop = index * ROW - list.clientHeight / 3;
  }
}

function step(by) {
  const index = order.indexOf(current) + by;
  if (index >= 0 && index < order.length) open(order[index]);
}

/** The address of this case, with all that is set otherwise than at first. */
function link() {
  const parameters = new URLSearchParams({ case: state.case, n: state.n });
  if (facts.systems.length > 1) { parameters.set("a", facts.systems[state.a].name); parameters.set("b", facts.systems[state.b].name); }
  if (facts.figures[state.figure]) parameters.set("figure", facts.figures[state.figure].name);
  parameters.set("by", state.measure);
  for (const name of ["least", "most", "q"]) if (state[name] !== "") parameters.set(name, state[name]);
  if (state.up) parameters.set("up", "1");
  return `#${parameters}`;
}

function keepLink() { history.replaceState(null, "", link()); }

/** Open what an address asks for. */
async function follow(hash) {
  if (!/^#(.*&)?case=/.test(hash)) return false;
  const parameters = new URLSearchParams(hash.slice(1));
  const number = ids.indexOf(parameters.get("case"));
  const system = (name, other) => { const index = facts.systems.findIndex((item) => item.name === parameters.get(name)); return index < 0 ? other : index; };
  state.a = system("a", state.a);
  state.b = system("b", state.b);
  const n = parseInt(parameters.get("n"), 10);
  if (n >= 1 && n <= 5) state.n = n;
  if (scoreIndex(parameters.get("figure")) >= 0) state.figure = scoreIndex(parameters.get("figure"));
  state.measure = parameters.get("by") || state.measure;
  state.up = parameters.get("up") === "1";
  for (const name of ["least", "most", "q"]) state[name] = parameters.get(name) || "";
  showControls();
  await arrange({ keep: true });
  if (number < 0) { at("found").textContent = `There is no case ${parameters.get("case")}.`; return true; }
  await open(number, { silent: true });
  at("cases").scrollIntoView({ behavior: "instant" });
  return true;
}

function showControls() {
  const systems = facts.systems.map((system, index) => [index, system.label]);
  fill(at("system-a"), systems, state.a);
  fill(at("system-b"), systems, state.b);
  fill(at("figure"), scoreChoices(), state.figure);
  const { list } = measures();
  if (!(state.measure in list)) state.measure = Object.keys(list)[0];
  fill(at("measure"), Object.entries(list).map(([name, [label]]) => [name, label]), state.measure);
  at("n").value = state.n;
  at("n-shown").textContent = state.n;
  at("search").value = state.q;
  at("least").value = state.least;
  at("most").value = state.most;
  at("direction").textContent = state.up ? "↑ lowest first" : "↓ highest first";
  at("direction").setAttribute("aria-pressed", state.up);
  at("system-b").parentElement.hidden = facts.systems.length < 2;
}

async function startCases() {
  if (!("DecompressionStream" in window)) {
    at("found").textContent = "This browser cannot unpack the cases. Any browser of 2023 or later can.";
    return;
  }
  ids = await unpacked("ids");
  const { kept, known } = facts.documents;
  if (kept) places = new Map((await unpacked("places")).map((number, index) => [number, index]));
  at("documents-note").textContent = !known ? "" : kept === ids.length ? "" :
    `${kept.toLocaleString("en")} of ${ids.length.toLocaleString("en")} cases have their document here` + (known > kept ? "; more would make the page too large." : ".");
  const change = (id, name, read, options = {}) => at(id).addEventListener(options.on || "change", () => {
    state[name] = read(at(id).value);
    showControls();
    arrange().then(keepLink);
  });
  change("system-a", "a", Number);
  change("system-b", "b", Number);
  change("figure", "figure", Number);
  change("measure", "measure", String);
  change("least", "least", String);
  change("most", "most", String);
  at("direction").addEventListener("click", () => { state.up = !state.up; showControls(); arrange().then(keepLink); });
  let pause;
  at("search").addEventListener("input", () => {
    clearTimeout(pause);
    pause = setTimeout(() => { state.q = at("search").value; arrange().then(keepLink); }, 200);
  });
  at("n").addEventListener("input", () => {
    state.n = +at("n").value;
    at("n-shown").textContent = state.n;
    drawCase();
    drawSeen();
    keepLink();
  });
  at("list").addEventListener("scroll", listRows, { passive: true });
  addEventListener("resize", listRows);
  at("previous").addEventListener("click", () => step(-1));
  at("next").addEventListener("click", () => step(1));
  at("link").addEventListener("click", () => copy(location.href.split("#")[0] + link(), "Link"));
  for (const kind of ["pointerover", "focusin"]) at("texts").addEventListener(kind, (event) => {
    const grams = event.target.grams || (event.target.matches("mark") ? [...event.target.children].flatMap((span) => span.grams) : []);
    light(grams);
  });
  for (const kind of ["pointerleave", "focusout"]) at("texts").addEventListener(kind, () => light([]));
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
    const inList = event.target === at("list");
    const frame = at("cases").getBoundingClientRect();
    if (frame.top > innerHeight * 0.8 || frame.bottom < innerHeight * 0.2) return;
    const by = { j: 1, k: -1, ArrowRight: 1, ArrowLeft: -1, ...(inList ? { ArrowDown: 1, ArrowUp: -1 } : {}) }[event.key];
    if (!by || (event.target.closest(".scroll") && event.key.startsWith("Arrow"))) return;
    event.preventDefault();
    step(by);
  });
  addEventListener("hashchange", () => follow(location.hash));
  showControls();
  if (!await follow(location.hash)) await arrange();
}

if (at("cases")) startCases();
