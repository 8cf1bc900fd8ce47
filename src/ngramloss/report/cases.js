// The case explorer: a list of all cases, of which only the rows in view exist; one case with shared n-grams marked.

const ROW = 60;          // height of a row in the list, as in the style sheet
const WORD = /[\p{L}\p{N}]+/gu;
const JOIN = "\u0001";   // between words of an n-gram; no word has it
const PART = 20_000;     // characters of a text that are shown at first: marking the words of millions takes seconds
const MOST = 200_000;    // the most that one click adds
const LONG = 500;        // characters of an id; a link to a case with a longer one has the case's number

/** The words of a text, lower-cased, with where they stand. */
function words(text) {
  return [...text.matchAll(WORD)].map((match) => ({ word: match[0].toLowerCase(), start: match.index, end: match.index + match[0].length }));
}

/** The beginning of a text, not cut inside a word where there is a gap, nor inside a character. */
function beginning(text, size) {
  if (text.length <= size) return text;
  const gap = text.slice(size - 100, size).search(/\s\S*$/);
  const end = gap < 0 ? size : size - 100 + gap;
  return text.slice(0, /[\ud800-\udbff]/.test(text[end - 1]) ? end - 1 : end);
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
const state = { n: 2, a: facts.pair[0], b: facts.pair[1], only: false, figure: 0, measure: "difference", up: false, least: "", most: "", q: "" };
let ids = [];
let order = [];          // numbers of the cases that are listed
let values = new Map();  // number → what the list is ordered by
let places = new Map();  // number of a case → index of its document
let marks = {};          // of each system, the cases whose text is empty or has the most tokens allowed
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

/** The scores that can be chosen, from the one that the reader has put first; the reference's length is no score of a system. */
function scoreChoices() {
  const choices = facts.figures.map((figure, index) => [index, figure.label]).filter(([index]) => facts.figures[index].name !== "reference words");
  const isFirst = ([index]) => facts.figures[index].name === first;
  return [...choices.filter(isFirst), ...choices.filter((choice) => !isFirst(choice))];
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
  if ([...marks.empty, ...marks.cutOff].some((cases) => cases.size)) {
    const has = (number) => (cases) => cases.has(number);
    list.marks = ["outputs empty or cut off", async () => (number) => marks.empty.filter(has(number)).length + marks.cutOff.filter(has(number)).length];
  }
  list.given = ["the order given", async () => (number) => number + 1];
  if (facts.systems.length < 2) { delete list.difference; delete list.b; }
  return { list, a, b };
}

let asked = 0;

/** Filter and sort, and show the list from its top. A newer request cancels an older one. */
async function arrange({ keep = false } = {}) {
  const mine = ++asked;
  const { list } = measures();
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
    element("div", { class: "top" }, element("bdi", { textContent: ids[number].slice(0, LONG), title: ids[number].slice(0, LONG) }), element("span", { class: "value" })), snippet);
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
      ...references.map((text, index) => ({ text, upTo: PART, kind: "reference", title: references.length > 1 ? `Reference ${index + 1}` : "Reference" })),
      ...texts.map((text, system) => ({ text, upTo: PART, kind: "system", title: facts.systems[system].label, system, scores: scoreText(system), role: roleOf(system) }))
        .sort((item, other) => (item.role || "C").localeCompare(other.role || "C")),   // A and B side by side
      ...(source === null ? [] : [{ text: source, upTo: PART, kind: "document", title: "Document" }]),
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
  const items = shownCase.texts.filter((item) => item.kind !== "system" || !state.only || item.role || facts.systems.length < 2);
  const read = items.map((item) => {
    const text = beginning(item.text, item.upTo);
    return { ...item, text, list: words(text) };
  });
  read.forEach((item) => { item.grams = ngrams(item.list, n); });
  const gold = new Set(read.filter((item) => item.kind === "reference").flatMap((item) => item.grams));
  const systems = read.filter((item) => item.kind === "system");
  const count = new Map();
  for (const item of systems) for (const gram of new Set(item.grams)) count.set(gram, (count.get(gram) || 0) + 1);
  const source = new Set(read.filter((item) => item.kind === "document").flatMap((item) => item.grams));
  occurrences = new Map();
  const cards = read.map((item, index) => {
    const weight = (gram) => item.kind !== "reference" ? (gold.has(gram) ? 1 : 0) :
      count.has(gram) ? (count.get(gram) === systems.length ? 3 : count.get(gram) * 2 > systems.length ? 2 : 1) : source.has(gram) && !systems.length ? 1 : 0;
    const body = element("p", { class: item.text.trim() ? "body" : "body nothing", dir: "auto" });
    marked(body, item, n, weight);
    const scores = item.scores ? element("span", { class: "scores", textContent: item.scores }) : "";
    const title = element("span", {}, element("bdi", { textContent: item.title }), ...(item.kind === "system" ? [...flags(item.system), pins(item.system)] : []));
    return element("div", { class: `text ${item.kind}${item.kind === "system" ? "" : " whole"}` }, element("h4", {}, title, scores), body, more(items[index], item.text.length, index));
  });
  at("texts").replaceChildren(...cards);
}

/** What a reader should know of an output before reading it. */
function flags(system) {
  const number = shownCase.number;
  const flag = (text, title) => element("span", { class: "flag", tabIndex: 0, role: "note", textContent: text, title, "aria-label": title });
  const most = facts.systems[system].mostTokens;
  return [
    ...(marks.empty[system].has(number) ? [flag("empty", "This output is empty.")] : []),
    ...(marks.cutOff[system].has(number) ? [flag("cut off?", `This output has ${most} tokens, the most allowed, so it may be cut off.`)] : []),
  ];
}

/** Two buttons that make a system A or B. */
function pins(system) {
  if (facts.systems.length < 2) return "";
  return element("span", { class: "pins" }, ...["a", "b"].map((role) => {
    const title = `Compare ${facts.systems[system].label} as ${role.toUpperCase()}`;
    const button = element("button", { type: "button", class: `role ${role.toUpperCase()}`, textContent: role.toUpperCase(), title,
      "aria-label": title, "aria-pressed": state[role] === system, "data-pin": `${role}-${system}` });
    button.addEventListener("click", () => pin(role, system));
    return button;
  }));
}

/** Make a system A or B and stay in the case. If it is the other one, they change places. */
async function pin(role, system) {
  const other = role === "a" ? "b" : "a";
  if (state[other] === system) state[other] = state[role];
  state[role] = system;
  showControls();
  await arrange({ keep: true });
  await open(current);
  at("texts").querySelector(`[data-pin="${role}-${system}"]`).focus();
}

/** A button for the next part of a long text. */
function more(item, there, index) {
  const left = item.text.length - there;
  if (!left) return "";
  const step = Math.min(left, MOST, item.upTo);
  const counted = (count) => count.toLocaleString("en");
  const button = element("button", { type: "button", class: "rest", textContent: `show ${counted(step)} more of ${counted(left)} characters` });
  button.addEventListener("click", () => {
    const place = button.parentElement.querySelector(".body").scrollTop;
    item.upTo += step;
    drawCase();
    const card = at("texts").children[index];
    card.querySelector(".body").scrollTop = place;
    card.querySelector(".rest")?.focus({ preventScroll: true });
  });
  return button;
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
    const cases = await unpacked(`seen-${index}`);
    if (Object.hasOwn(cases, ids[current])) parts.push(seenBy(name, cases[ids[current]]));
  }
  if (!parts.length) { at("seen").replaceChildren(); return; }
  const key = (kind, text) => element("span", {}, element("i", { class: kind }), text);
  at("seen").replaceChildren(
    element("h3", { textContent: "What the objective saw" }),
    element("p", { class: "keys" }, "Above, the reference; below, the most probable token, the darker the surer. ",
      key("free", `matches(${state.n}): its window is in the reference, anywhere`), key("bound", `rewards(${state.n}): in this very place`)),
    ...parts);
}

const SIGNS = new Map([["", "∅"], [" ", "␣"], ["\n", "⏎"], ["\t", "⇥"]]);

/** A token as it is shown: one that nobody could see has a sign. */
function tokenText(token) {
  if (!/^[\s\p{C}]*$/u.test(token)) return element("span", { textContent: token });
  const sign = SIGNS.get(token) ?? [...token].map((letter) => SIGNS.get(letter) ?? `U+${letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`).join("");
  return element("span", { class: "sign", textContent: sign, title: token === "" ? "an empty token" : "a token without visible characters" });
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
    const under = tokenText(best[index]);
    under.classList.add("best-token", ...(token === best[index] ? [] : ["wrong"]));
    under.style.background = `color-mix(in srgb, var(--accent) ${Math.round(sure * 0.45)}%, transparent)`;
    const cell = element("span", { class: "token" }, tokenText(token), under,
      element("span", { class: free[index] ? "free on" : "free" }), element("span", { class: bound[index] ? "bound on" : "bound" }));
    const label = probability && probability[index] !== null ? `; the reference’s token ${Math.round(100 * probability[index])}%` : "";
    cell.title = `${under.textContent} ${sure}%${label}`;
    return cell;
  }));
  const { objective, label } = facts.systems.find((system) => system.name === name);
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

/** What an address says of a case: its id, or its number where the id is too long for an address. */
const caseParameter = (number) => ids[number].length <= LONG ? { case: ids[number] } : { number: number + 1 };

/** The address of this case, with all that is set otherwise than at first. */
function link() {
  const parameters = new URLSearchParams({ ...(current < 0 ? {} : caseParameter(current)), n: state.n });
  if (facts.systems.length > 1) { parameters.set("a", facts.systems[state.a].name); parameters.set("b", facts.systems[state.b].name); }
  if (facts.figures[state.figure]) parameters.set("figure", facts.figures[state.figure].name);
  parameters.set("by", state.measure);
  for (const name of ["least", "most", "q"]) if (state[name] !== "") parameters.set(name, state[name]);
  if (state.up) parameters.set("up", "1");
  if (state.only) parameters.set("only", "1");
  if (first) parameters.set("first", first);
  return `#${parameters}`;
}

function keepLink() { history.replaceState(null, "", link()); }

/** Open what an address asks for. */
async function follow(hash) {
  if (!/^#(.*&)?(case|number)=/.test(hash)) return false;
  const parameters = new URLSearchParams(hash.slice(1));
  const counted = parameters.get("number") - 1;   // from 1 on
  const number = parameters.has("case") ? ids.indexOf(parameters.get("case")) : counted in ids ? counted : -1;
  const system = (name, other) => { const index = facts.systems.findIndex((item) => item.name === parameters.get(name)); return index < 0 ? other : index; };
  state.a = system("a", state.a);
  state.b = system("b", state.b);
  const n = parseInt(parameters.get("n"), 10);
  if (n >= 1 && n <= 5) state.n = n;
  if (at("first") && [...at("first").options].some(({ value }) => value === parameters.get("first"))) putFirst(parameters.get("first"));
  if (scoreIndex(parameters.get("figure")) >= 0) state.figure = scoreIndex(parameters.get("figure"));
  state.measure = parameters.get("by") || state.measure;
  state.up = parameters.get("up") === "1";
  state.only = parameters.get("only") === "1";
  for (const name of ["least", "most", "q"]) state[name] = parameters.get(name) || "";
  showControls();
  await arrange({ keep: true });
  if (number < 0) { at("found").textContent = `There is no case ${parameters.get("case") ?? parameters.get("number")}.`; return true; }
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
  if (!Object.hasOwn(list, state.measure)) state.measure = Object.keys(list)[0];
  fill(at("measure"), Object.entries(list).map(([name, [label]]) => [name, label]), state.measure);
  at("n").value = state.n;
  at("n-shown").textContent = state.n;
  at("search").value = state.q;
  at("least").value = state.least;
  at("most").value = state.most;
  at("direction").textContent = state.up ? "↑ lowest first" : "↓ highest first";
  at("direction").setAttribute("aria-pressed", state.up);
  at("system-b").parentElement.hidden = at("only").hidden = facts.systems.length < 2;
  at("only").setAttribute("aria-pressed", state.only);
  at("pair-names").replaceChildren(...(facts.systems.length < 2 ? [] : ["a", "b"].map((role) => element("span", {},
    element("span", { class: `role ${role.toUpperCase()}`, textContent: role.toUpperCase() }), element("bdi", { textContent: facts.systems[state[role]].label })))));
}

async function startCases() {
  if (!("DecompressionStream" in window)) {
    at("found").textContent = "This browser cannot unpack the cases. Any browser of 2023 or later can.";
    return;
  }
  ids = await unpacked("ids");
  const sets = (systems) => systems.map((numbers) => new Set(numbers));
  const { empty, cutOff } = await unpacked("marks");
  marks = { empty: sets(empty), cutOff: sets(cutOff) };
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
  at("only").addEventListener("click", () => { state.only = !state.only; showControls(); drawCase(); keepLink(); });
  if (at("first")) at("first").addEventListener("change", () => {
    if (scoreIndex(first) >= 0) state.figure = scoreIndex(first);
    showControls();
    arrange().then(keepLink);
  });
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
  at("link").addEventListener("click", () => copy(location.href.split("#")[0] + link(), "Link", document.querySelector("#case .bar")));
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
