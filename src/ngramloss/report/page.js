"use strict";
// What every part of the page uses: facts, compressed blocks, elements; then theme, navigation, the table and copying.
// Nothing is ever inserted as markup: text goes in as text.

const facts = JSON.parse(document.getElementById("facts").textContent);
const at = (id) => document.getElementById(id);

/** An element with properties and children; strings become text. */
function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") node.className = value;
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** The bytes of a block that the page carries: base64, then gzip. */
async function bytes(name) {
  const text = atob(at(`pack-${name}`).textContent);
  const zipped = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index++) zipped[index] = text.charCodeAt(index);
  const plain = new Blob([zipped]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(plain).arrayBuffer();
}

const blocks = new Map();

/** What a block of JSON says, unpacked once. */
function unpacked(name) {
  if (!blocks.has(name)) blocks.set(name, bytes(name).then((content) => JSON.parse(new TextDecoder().decode(content))));
  return blocks.get(name);
}

const columns = new Map();

/** A score of every case and system, as a function (case, system) → number, NaN where there is none. */
function scoreValues(index) {
  if (!columns.has(index)) columns.set(index, bytes(`figure-${index}`).then((content) => {
    const { low, decimals, systems } = facts.figures[index];
    const codes = new Uint16Array(content);
    const scale = 10 ** decimals;
    return (number, system) => {
      const code = codes[number * systems + (systems === 1 ? 0 : system)];
      return code === facts.nothing ? NaN : low + code / scale;
    };
  }));
  return columns.get(index);
}

/** A number with its decimals and a real minus; whole numbers without decimals. */
function shown(value, { signed = false, digits = 2 } = {}) {
  if (Number.isNaN(value)) return "–";
  const scale = 10 ** digits;
  const near = Math.round(value * scale) / scale;
  const text = Number.isInteger(value) && !signed ? String(value) : near.toFixed(digits);
  return ((signed && near > 0 ? "+" : "") + text).replace("-", "−");
}

function fill(select, options, chosen) {
  select.replaceChildren(...options.map(([value, label]) => element("option", { value, textContent: label })));
  if (chosen !== undefined) select.value = chosen;
  select.title = select.selectedOptions[0]?.textContent ?? "";   // a closed box may be too narrow for a name
}

/** Copy a text; what is said of it, or the text itself where the clipboard is refused, stands below an element. */
async function copy(text, what, above) {
  above.after(at("copied"), at("copy-text"));
  try {
    await navigator.clipboard.writeText(text);
    at("copied").textContent = `${what} copied.`;
    at("copy-text").hidden = true;
  } catch {
    at("copied").textContent = "The clipboard is closed to this page. Copy from here:";
    at("copy-text").value = text;
    at("copy-text").hidden = false;
    at("copy-text").focus();
    at("copy-text").select();
  }
}

function startTheme() {
  const stored = (value) => {
    try { return value === undefined ? localStorage.getItem("theme") : localStorage.setItem("theme", value); }
    catch { return null; }   // some browsers store nothing for pages from disk
  };
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const before = stored();
  if (before === "light" || before === "dark") root.dataset.theme = before;
  at("theme").addEventListener("click", () => {
    const now = root.dataset.theme || (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    stored(root.dataset.theme);
    document.dispatchEvent(new Event("theme"));
  });
  dark.addEventListener("change", () => document.dispatchEvent(new Event("theme")));
}

function startNavigation() {
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) {
      links.forEach((link, name) => link.classList.toggle("here", name === entry.target.id));
    }
  }, { rootMargin: "-20% 0px -70% 0px" });
  document.querySelectorAll("main > section").forEach((section) => watch.observe(section));
}

/** Sort the systems by a column: best first, then worst first, then as they came. */
function startTable(table) {
  const body = table.querySelector(".systems");
  const runs = new Map();   // row → the rows of its runs, which stay below it
  let above;
  for (const row of body.rows) {
    if (row.classList.contains("run")) runs.get(above).push(row);
    else runs.set(above = row, []);
  }
  const rows = [...runs.keys()];
  const cells = new Map(rows.map((row) => [row, [...row.cells]]));   // as given, whichever column the reader puts first
  const value = (row, column) => column === "label" ? row.cells[0].textContent : parseFloat(cells.get(row)[+column + 1].dataset.value);
  const compare = (a, b) => typeof a === "string" ? a.localeCompare(b) : Number.isNaN(a) - Number.isNaN(b) || a - b;
  for (const button of table.querySelectorAll("[data-sort]")) button.addEventListener("click", () => {
    const head = button.closest("th");
    const upwards = button.dataset.sort === "label" || "lower" in button.dataset;
    const turns = upwards ? ["ascending", "descending", "none"] : ["descending", "ascending", "none"];
    const turn = turns[(turns.indexOf(head.getAttribute("aria-sort")) + 1) % 3];
    table.querySelectorAll("[aria-sort]").forEach((other) => other.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", turn);
    const sign = turn === "descending" ? -1 : 1;
    const known = (row) => typeof value(row, button.dataset.sort) === "string" || !Number.isNaN(value(row, button.dataset.sort));
    const order = turn === "none" ? rows : [...rows].sort((a, b) =>
      known(b) - known(a) || sign * compare(value(a, button.dataset.sort), value(b, button.dataset.sort)));
    body.append(...order.flatMap((row) => [row, ...runs.get(row)]));
  });
  for (const [row, members] of runs) row.querySelector(".opens")?.addEventListener("click", ({ target }) => {
    const open = target.getAttribute("aria-expanded") !== "true";
    target.setAttribute("aria-expanded", open);
    for (const member of members) member.hidden = !open;
  });
}

let first = "";   // the score that the reader has put first, if any

/** Put a score first in every table that has it; cases and distributions begin with it, too. */
function putFirst(name) {
  first = name;
  at("first").value = name;
  const drawings = [...document.querySelectorAll("[data-estimates]")];
  if (drawings.some((one) => one.dataset.estimates === name)) for (const one of drawings) one.hidden = one.dataset.estimates !== name;
  tablesInOrder.forEach((order) => order(name));
  document.dispatchEvent(new Event("first"));
}

/** A function that puts one column of a table before the other scores, which keep their order. */
function startOrder(table) {
  const names = [...table.tHead.rows[0].cells].map((cell) => cell.dataset.score);
  const rows = [...table.rows].filter((row) => row.cells.length === names.length).map((row) => [row, [...row.cells]]);
  const start = names.findIndex((name) => name !== undefined);
  return (name) => {
    const column = names.indexOf(name);
    if (column < 0) return;
    for (const [row, cells] of rows) row.replaceChildren(...cells.slice(0, start), cells[column], ...cells.slice(start).filter((cell) => cell !== cells[column]));
  };
}

/** What stands below each score, and copies of the first table, its rows in the order they now have. */
function startTools() {
  for (const button of document.querySelectorAll("[data-below]")) button.addEventListener("click", () => {
    at("results").className = `below-${button.dataset.below}`;
    document.querySelectorAll("[data-below]").forEach((other) => other.setAttribute("aria-pressed", other === button));
  });
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => {
    const form = facts.copies[button.dataset.copy];
    const lines = [...document.querySelector(".systems").querySelectorAll("[data-place]")].map((row) => form.rows[row.dataset.place]);
    copy([...form.before, ...lines, ...form.after].join("\n"), button.textContent, button.closest(".head"));
  });
}

startTheme();
startNavigation();
document.querySelectorAll(".sortable").forEach(startTable);
const tablesInOrder = [...document.querySelectorAll(".ordered")].map(startOrder);
if (at("first")) at("first").addEventListener("change", () => putFirst(at("first").value));
startTools();
for (const button of document.querySelectorAll("[data-copy-text]")) {
  button.addEventListener("click", () => copy(button.dataset.copyText, "Signature", button.closest("div")));
}
