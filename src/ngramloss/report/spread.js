// Distributions: how much two systems differ, case by case; and whether a score depends on length.

const SVG = "http://www.w3.org/2000/svg";
const BARS = 20;    // on each side of no difference
const GROUPS = 12;  // of equal size, by length, for the line of means

function drawn(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

/** The next number with few digits that is not below a size. */
function round(size, digits = [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10]) {
  const power = 10 ** Math.floor(Math.log10(size));
  return power * digits.find((item) => item * power >= size * (1 - 1e-9));
}

/** The multiples of 1, 2 or 5 times a power of ten between two numbers, about five; none closer than ``least``. */
function ticks(low, top, least = 0) {
  const step = Math.max(least, round((top - low) / 5 || 1, [1, 2, 5, 10]));
  const start = Math.ceil(low / step - 1e-9);
  const count = Math.floor(top / step + 1e-9) - start + 1;
  return Array.from({ length: count }, (_, index) => Number(((start + index) * step).toPrecision(9)));
}

const spread = { a: facts.pair[0], b: facts.pair[1], figure: 0, length: "words" };
const counted = (number) => number.toLocaleString("en");

async function drawHistogram() {
  const value = await scoreValues(spread.figure);
  const { label, lower, ranks, digits } = facts.figures[spread.figure];
  const change = (value) => shown(value, { signed: true, digits });
  const differences = [];
  for (let number = 0; number < facts.count; number++) {
    const difference = value(number, spread.b) - value(number, spread.a);
    if (!Number.isNaN(difference)) differences.push(Math.abs(difference) < 1e-9 ? 0 : difference);
  }
  const title = `${label}: B − A in each case`;
  at("histogram-title").textContent = title;
  const sizes = differences.map(Math.abs).filter(Boolean).sort((x, y) => x - y);
  const reach = round(sizes[Math.floor(0.98 * (sizes.length - 1))] || 1);
  const width = reach / BARS;
  const bars = new Array(2 * BARS).fill(0);
  for (const item of differences) if (item) {
    const bar = BARS + (item > 0 ? Math.ceil(item / width - 1e-9) - 1 : Math.floor(item / width + 1e-9));
    bars[Math.max(0, Math.min(2 * BARS - 1, bar))]++;
  }
  const [wide, high, left, bottom] = [520, 260, 44, 26];
  const tick = round(Math.max(...bars, 4) / 4, [1, 2, 5, 10]);
  const most = tick * Math.max(1, Math.ceil(Math.max(...bars) / tick));
  const across = (index) => left + index * (wide - left) / (2 * BARS);
  const up = (count) => high - bottom - (high - bottom - 10) * count / most;
  const svg = drawn("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": title });
  for (let count = 0; count <= most; count += tick) {
    svg.append(drawn("line", { x1: left, x2: wide, y1: up(count), y2: up(count) }),
      drawn("text", { x: left - 6, y: up(count) + 4, "text-anchor": "end" }, counted(count)));
  }
  bars.forEach((count, index) => {
    const bar = drawn("rect", { x: across(index) + 0.75, width: (wide - left) / (2 * BARS) - 1.5, y: up(count), height: up(0) - up(count),
      class: !ranks ? "" : (index >= BARS) !== lower ? "more" : "less" });
    const end = index === 0 || index === 2 * BARS - 1 ? " and beyond" : "";
    bar.append(drawn("title", {}, `${counted(count)} cases from ${change((index - BARS) * width)} to ${change((index - BARS + 1) * width)}${end}`));
    svg.append(bar);
  });
  for (const share of [-1, -0.5, 0, 0.5, 1]) {
    svg.append(drawn("text", { x: across(BARS * (1 + share)), y: high - 8, "text-anchor": share === 1 ? "end" : share === -1 ? "start" : "middle" },
      `${share > 0 ? "+" : ""}${share * reach}`.replace("-", "−")));
  }
  at("histogram").replaceChildren(svg);
  const more = differences.filter((item) => item > 0).length;
  const less = differences.filter((item) => item < 0).length;
  const mean = differences.reduce((sum, item) => sum + item, 0) / differences.length;
  const [first, second] = ranks ? (lower ? [less, more] : [more, less]) : [more, less];
  at("histogram-note").textContent = !differences.length ? "No case has this score in both systems." :
    `B is ${ranks ? "better" : "higher"} in ${counted(first)} cases, ${ranks ? "worse" : "lower"} in ${counted(second)}; mean ${change(mean)}. ` +
    `${counted(differences.length - more - less)} without a difference are not drawn. The outer bars hold all beyond.`;
}

let points = [];

/** Means of groups of equal size, from the shortest to the longest. */
function means(list) {
  const sorted = [...list].sort((item, other) => item.x - other.x);
  const size = Math.ceil(sorted.length / GROUPS);
  if (size < 8) return [];
  const groups = Array.from({ length: GROUPS }, (_, index) => sorted.slice(index * size, (index + 1) * size)).filter((group) => group.length);
  const mean = (group, name) => group.reduce((sum, point) => sum + point[name], 0) / group.length;
  return groups.map((group) => [mean(group, "x"), mean(group, "y")]);
}

async function drawScatter() {
  const [score, length] = await Promise.all([scoreValues(spread.figure), scoreValues(scoreIndex(spread.length))]);
  const { label } = facts.figures[spread.figure];
  const what = facts.figures[scoreIndex(spread.length)].label;
  at("scatter-title").textContent = `${label} against length`;
  const canvas = at("scatter");
  const [wide, high] = [canvas.clientWidth, canvas.clientHeight];
  canvas.width = wide * devicePixelRatio;
  canvas.height = high * devicePixelRatio;
  const pen = canvas.getContext("2d");
  pen.scale(devicePixelRatio, devicePixelRatio);
  const probe = document.body.appendChild(document.createElement("i"));   // a canvas cannot read the style sheet's colours
  const colour = (name) => { probe.style.color = `var(${name})`; return getComputedStyle(probe).color; };
  const systems = spread.a === spread.b ? [spread.a] : [spread.a, spread.b];
  points = [];
  for (let number = 0; number < facts.count; number++) systems.forEach((system, index) => {
    const [x, y] = [length(number, system), score(number, system)];
    if (!Number.isNaN(x) && !Number.isNaN(y)) points.push({ x, y, number, index });
  });
  const range = (name) => points.reduce(([low, top], point) => [Math.min(low, point[name]), Math.max(top, point[name])], [Infinity, -Infinity]);
  const [[left, right], [low, top]] = [range("x"), range("y")];
  const [x0, x1, y0, y1] = [48, wide - 8, high - 26, 8];
  const across = (x) => x0 + (x - left) / (right - left || 1) * (x1 - x0);
  const up = (y) => y0 - (y - low) / (top - low || 1) * (y0 - y1);
  pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  pen.fillStyle = colour("--muted");
  pen.strokeStyle = colour("--line");
  pen.textAlign = "right";
  if (points.length) for (const y of ticks(low, top)) {
    pen.beginPath(); pen.moveTo(x0, up(y)); pen.lineTo(x1, up(y)); pen.stroke();
    pen.fillText(String(y).replace("-", "−"), x0 - 6, up(y) + 4);
  }
  pen.textAlign = "center";
  if (points.length) for (const x of ticks(left, right, 1)) pen.fillText(counted(x), Math.min(across(x), x1 - 8), high - 8);
  const names = systems.length > 1 ? ["--series-1", "--series-0"] : ["--series-0"];   // B is blue, as in the histogram
  const colours = names.map(colour);
  pen.globalAlpha = Math.max(0.14, Math.min(0.8, 500 / points.length));
  for (const point of points) {   // lengths are whole numbers: the two systems stand side by side
    point.px = across(point.x) + (systems.length > 1 ? (point.index ? 2 : -2) : 0);
    point.py = up(point.y);
    pen.fillStyle = colours[point.index];
    pen.fillRect(point.px - 1.5, point.py - 1.5, 3, 3);
  }
  pen.globalAlpha = 1;
  pen.lineJoin = "round";
  systems.forEach((_, index) => {
    const line = new Path2D();
    means(points.filter((point) => point.index === index)).forEach(([x, y], number) => line[number ? "lineTo" : "moveTo"](across(x), up(y)));
    for (const [name, thick] of [["--paper", 5], [names[index], 2.2]]) { pen.strokeStyle = colour(name); pen.lineWidth = thick; pen.stroke(line); }
  });
  probe.remove();
  const legend = systems.map((system, index) => `${index === systems.length - 1 ? "blue" : "orange"} ${facts.systems[system].label}`).join(", ");
  at("scatter-note").textContent = `Across, ${what}; ${legend}. Lines are means of ${GROUPS} groups of equal size. A click opens the nearest case.`;
  canvas.setAttribute("aria-label", `${label} against ${what}, ${counted(points.length)} points`);
}

function startSpread() {
  const systems = facts.systems.map((system, index) => [index, system.label]);
  fill(at("spread-a"), systems, spread.a);
  fill(at("spread-b"), systems, spread.b);
  fill(at("spread-figure"), scoreChoices(), spread.figure);
  fill(at("spread-length"), [["words", `the ${facts.text}`], ["reference words", "the reference"]], spread.length);
  const draw = () => Promise.all([drawHistogram(), drawScatter()]);
  for (const [id, name, read] of [["spread-a", "a", Number], ["spread-b", "b", Number], ["spread-figure", "figure", Number], ["spread-length", "length", String]]) {
    at(id).addEventListener("change", () => { spread[name] = read(at(id).value); draw(); });
  }
  at("scatter").addEventListener("click", (event) => {
    if (!points.length) return;
    const far = (point) => (point.px - event.offsetX) ** 2 + (point.py - event.offsetY) ** 2;
    const nearest = points.reduce((best, point) => far(point) < far(best) ? point : best);
    location.hash = new URLSearchParams({ ...caseParameter(nearest.number), n: state.n, a: facts.systems[spread.a].name, b: facts.systems[spread.b].name, figure: facts.figures[spread.figure].name });
  });
  document.addEventListener("first", () => {
    if (scoreIndex(first) >= 0) spread.figure = scoreIndex(first);
    fill(at("spread-figure"), scoreChoices(), spread.figure);
    if (at("histogram").childElementCount) draw();
  });
  let pause;
  addEventListener("resize", () => { clearTimeout(pause); pause = setTimeout(drawScatter, 150); });
  document.addEventListener("theme", drawScatter);
  // Drawn when it comes into view, so that opening the page does not wait for it.
  const watch = new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting)) { watch.disconnect(); draw(); }
  }, { rootMargin: "300px" });
  watch.observe(at("spread"));
}

if (at("spread") && "DecompressionStream" in window) startSpread();
