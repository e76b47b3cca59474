"use strict";
// Everything that a model or a data set wrote is put into the page with textContent, never as markup.
const PAGE = 50;
const MOST = 1e6; // cells of a table of common words
const HEADS = ["task", "original", "model", "delta", "gained", "lost", "verdict"];
const CHOICES = ["task", "model", "kind", "text"];
const FIRST = { kind: "changed", text: "" };
const index = JSON.parse(document.getElementById("index").textContent);
const by = (id) => document.getElementById(id);
const loaded = new Map();
let page = 0;
let turn = 0;

async function load(task) {
  if (!loaded.has(task)) {
    const text = by("task-" + task).textContent;
    const packed = atob(text);
    const bytes = new Uint8Array(packed.length);
    for (let i = 0; i < packed.length; i += 1) bytes[i] = packed.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    loaded.set(task, JSON.parse(await new Response(stream).text()));
  }
  return loaded.get(task);
}

function outcome(item, model) {
  const [before, after] = [item.answers[0].score, item.answers[model].score];
  if (after > before) return "gained";
  if (after < before) return "lost";
  // Equal divergences are neither right nor wrong.
  return after > 0 || item.answers[model].shown ? "kept" : "never";
}

function matches(item, model, kind, text) {
  const found = outcome(item, model);
  if (kind === "changed" ? found !== "gained" && found !== "lost" : kind !== "all" && kind !== found) return false;
  if (!text) return true;
  const words = [String(item.id), item.prompt, item.target, ...(item.choices || [])];
  for (const place of [0, model]) words.push(...item.answers[place].texts, item.answers[place].note);
  return words.some((word) => word && word.toLowerCase().includes(text.toLowerCase()));
}

function element(name, kind, text) {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  if (text !== undefined) made.textContent = text;
  return made;
}

// The expected one of the choices where the target names it, by its place or by its text; -1 where it is not plain which.
function expected(item) {
  const texts = (item.choices || []).map((text) => text.trim());
  const target = String(item.target ?? "").trim();
  const places = [/^\d+$/.test(target) && Number(target) < texts.length ? Number(target) : -1, texts.indexOf(target)];
  const named = places.filter((place) => place >= 0);
  return named.length && named.every((place) => place === named[0]) ? named[0] : -1;
}

// What the model chose: the likeliest, for acc_norm the likeliest per character, as the metric has it.
function chosen(item, values, metric) {
  const lengths = values.map((_, place) => (item.choices ? item.choices[place].replace(/^ /, "").length : 1));
  const scores = values.map((value, place) =>
    value === null ? -Infinity : metric.startsWith("acc_norm") ? value / Math.max(1, lengths[place]) : value);
  return scores.indexOf(Math.max(...scores));
}

// Words and blanks of a text, so that all of them together are the text again.
function pieces(text) {
  return text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];
}

// Which pieces of each of two texts are not in their longest common row; null where they are too many to tell.
function differences(one, other) {
  let start = 0;
  while (start < Math.min(one.length, other.length) && one[start] === other[start]) start += 1;
  let end = 0;
  const rest = Math.min(one.length, other.length) - start;
  while (end < rest && one[one.length - 1 - end] === other[other.length - 1 - end]) end += 1;
  const [a, b] = [one.slice(start, one.length - end), other.slice(start, other.length - end)];
  if (a.length * b.length > MOST) return null;
  const width = b.length + 1;
  const common = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      common[i * width + j] = a[i] === b[j]
        ? common[(i + 1) * width + j + 1] + 1
        : Math.max(common[(i + 1) * width + j], common[i * width + j + 1]);
    }
  }
  const found = [new Set(), new Set()];
  for (let i = 0, j = 0; i < a.length || j < b.length; ) {
    if (i < a.length && j < b.length && a[i] === b[j]) [i, j] = [i + 1, j + 1];
    else if (j === b.length || (i < a.length && common[(i + 1) * width + j] >= common[i * width + j + 1])) {
      found[0].add(start + i++);
    } else found[1].add(start + j++);
  }
  return found;
}

// The text of one of two answers (side 0 or 1), the words marked that only it has; as it is where nothing is in common.
function marked(texts, side) {
  const box = element("pre");
  const both = texts.includes(undefined) || texts[0] === texts[1] ? null : texts.map(pieces);
  const found = both && differences(...both)?.[side];
  if (!found || found.size === both[side].length) {
    box.textContent = texts[side];
    return box;
  }
  let [run, inside] = ["", false];
  const flush = () => run && box.append(inside ? element("mark", "", run) : document.createTextNode(run));
  both[side].forEach((piece, place) => {
    if (found.has(place) !== inside) {
      flush();
      [run, inside] = ["", !inside];
    }
    run += piece;
  });
  flush();
  return box;
}

function answer(item, models, side, metric) {
  const model = models[side];
  const given = item.answers[model];
  // A divergence is neither right nor wrong.
  const kind = given.shown ? "" : given.score > 0 ? "right" : "wrong";
  const box = element("section", "answer " + kind);
  box.append(element("h3", "", index.models[model] + " · " + (given.shown ?? given.score) + (given.note ? " · " + given.note : "")));
  if (given.loglikelihoods) {
    const [best, target] = [chosen(item, given.loglikelihoods, metric), expected(item)];
    const table = element("table");
    given.loglikelihoods.forEach((value, place) => {
      const row = element("tr", place === best ? "chosen" : "");
      row.append(element("td", "", value === null ? "not finite" : value.toFixed(2)));
      const text = item.choices ? item.choices[place] : "choice " + (place + 1);
      row.append(element("td", "", text), element("td", "expected", place === target ? "✓" : ""));
      table.append(row);
    });
    box.append(table);
  }
  given.texts.forEach((_, place) => box.append(marked(models.map((each) => item.answers[each].texts[place]), side)));
  return box;
}

function article(item, model, metric) {
  const box = element("article", outcome(item, model));
  box.append(element("h2", "", String(item.id)));
  if (item.prompt) box.append(element("pre", "", item.prompt));
  if (item.target) {
    const more = element("details");
    more.append(element("summary", "", "expected"), element("pre", "", item.target));
    box.append(more);
  }
  const both = element("div", "answers");
  both.append(answer(item, [0, model], 0, metric), answer(item, [0, model], 1, metric));
  box.append(both);
  return box;
}

// A line a task; a click shows its items.
function overview(model, current) {
  const table = element("table");
  const head = element("tr");
  head.append(...HEADS.map((text) => element("th", "", text)));
  table.append(head);
  index.tasks.forEach((task, place) => {
    const row = element("tr", place === current ? "shown" : "");
    const [name, button] = [element("td"), element("button", "", task.name)];
    button.addEventListener("click", () => {
      by("task").value = task.name;
      page = 0;
      remember();
      show();
    });
    name.append(button);
    row.append(name, ...task.overview[model].map((text) => element("td", "", text)));
    table.append(row);
  });
  by("overview").replaceChildren(table);
}

async function show() {
  const mine = ++turn;
  const [task, name, kind, text] = CHOICES.map((id) => by(id).value);
  const place = index.tasks.findIndex((each) => each.name === task);
  const model = index.models.indexOf(name);
  if (!loaded.has(place)) by("count").textContent = "unpacking …";
  const items = await load(place);
  if (mine !== turn) return;
  const found = items.filter((item) => matches(item, model, kind, text));
  const pages = Math.max(1, Math.ceil(found.length / PAGE));
  page = Math.min(Math.max(page, 0), pages - 1);
  by("count").textContent = found.length + " of " + items.length + " items, page " + (page + 1) + " of " + pages;
  by("back").disabled = page === 0;
  by("next").disabled = page === pages - 1;
  overview(model, place);
  by("facts").textContent = index.tasks[place].facts[model];
  const metric = index.tasks[place].metric;
  by("items").replaceChildren(
    ...found.slice(page * PAGE, (page + 1) * PAGE).map((item) => article(item, model, metric)));
}

// The address keeps what is looked at, so that it can be sent to somebody: items.html#task=gsm8k&model=fcsd&kind=lost
function remember() {
  const chosen = CHOICES.map((id) => [id, by(id).value]).filter(([, value]) => value !== "");
  if (page) chosen.push(["page", page + 1]);
  history.replaceState(null, "", "#" + new URLSearchParams(chosen));
}

function recall() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const id of CHOICES) {
    by(id).value = wanted.get(id) ?? FIRST[id];
    if (by(id).value === "") by(id).value = FIRST[id]; // what a list does not have
  }
  page = (Number.parseInt(wanted.get("page"), 10) || 1) - 1;
  return show();
}

function turnPage(step) {
  page += step;
  return show().then(remember);
}

function fill(id, names) {
  for (const name of names) {
    const option = element("option", "", name);
    option.value = name;
    by(id).append(option);
  }
  FIRST[id] = names[0];
}

function start() {
  by("note").textContent = index.note;
  fill("task", index.tasks.map((task) => task.name));
  fill("model", index.models.slice(1));
  FIRST.model = index.first;
  for (const id of CHOICES) {
    by(id).addEventListener("input", () => {
      page = 0;
      remember();
      show();
    });
  }
  by("filter").addEventListener("submit", (event) => event.preventDefault());
  by("back").addEventListener("click", () => turnPage(-1));
  by("next").addEventListener("click", () => turnPage(1));
  addEventListener("hashchange", recall);
  addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    if (event.target.closest("input, select, pre")) return; // there the arrows have a meaning of their own
    turnPage(step).then(() => scrollTo(0, 0));
  });
  return recall();
}
start();
