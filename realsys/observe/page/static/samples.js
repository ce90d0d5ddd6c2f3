"use strict";
const FIELDS = ["source", "verdict", "order", "text", "truncated", "reward_min", "reward_max", "stale_min", "stale_max", "tokens_min", "group"];
const PAGE = 100, MARKS = {true: ["✓", "good", "correct"], false: ["✗", "bad", "wrong"], null: ["–", "calm", "not judged"]};
let rows = [], prompts = {}, matched = 0, shown = null, chosen = "", request = 0, opening = 0; // numbers of the newest requests
const valueOf = name => $(name).type === "checkbox" ? ($(name).checked ? "1" : "") : $(name).value.trim();
function query() {
  const made = new URLSearchParams();
  for (const name of FIELDS) if (valueOf(name) && !(name === "verdict" && valueOf(name) === "any") && !(name === "order" && valueOf(name) === "source")) made.set(name, valueOf(name));
  return made;
}
function remember() {
  const made = query();
  if (chosen) made.set("id", chosen);
  if (colour() !== "version") made.set("colour", colour());
  if (fragment().get("key")) made.set("key", fragment().get("key"));
  history.replaceState(null, "", "#" + made);
}
const colour = () => document.querySelector("[name=colour]:checked").value;
async function start() {
  try {
    const sources = await load("api/sources"), wanted = fragment(), groups = {step: "train steps", eval: "evaluations", dropped: "not trained"};
    withKey($("statusLink"));
    $("source").replaceChildren(...Object.entries(groups).map(([kind, label]) => {
      const group = element("optgroup");
      group.label = label;
      group.append(...sources.filter(s => s.kind === kind).map(s => { const o = element("option", s.label); o.value = s.name; return o; }));
      return group;
    }).filter(group => group.children.length));
    if (!sources.length) {
      $("count").textContent = "This trial has no samples: wait for the first step, or set record.keep_steps above 0.";
      document.body.dataset.ready = "1";
      return;
    }
    for (const name of FIELDS) if (wanted.has(name)) $(name).type === "checkbox" ? $(name).checked = true : $(name).value = wanted.get(name);
    if (!$("source").value) $("source").value = sources[0].name;
    if (FIELDS.slice(4).some(valueOf)) $("more").open = true;
    const by = document.querySelector(`[name=colour][value="${CSS.escape(wanted.get("colour") || "version")}"]`);
    if (by) by.checked = true;
    chosen = wanted.get("id") || "";
    await list();
  } catch (error) { failed(error, start); }
}
function failed(error, again) {
  if (error instanceof NeedsKey) return askForKey(again);
  $("count").textContent = String(error.message || error);
  console.warn(error);
}
async function list(more = false) {
  const own = ++request;
  if (!more) ++opening; // a sample of the list before must not be shown beside this one
  $("count").textContent = more ? $("count").textContent : "reading";
  try {
    const found = await load(`api/list?${query()}&offset=${more ? rows.length : 0}&limit=${PAGE}`);
    if (own !== request) return;
    rows = more ? [...rows, ...found.rows] : found.rows;
    prompts = more ? {...prompts, ...found.prompts} : found.prompts;
    matched = found.matched;
    $("title").textContent = found.title;
    document.title = "samples · " + found.title;
    const good = found.rows.length ? "" : ": change the filters";
    $("count").textContent = `${number(matched)} of ${number(found.total)} samples` + good
      + (found.unsearched ? `; the search ended after ${number(found.searched)}: narrow it with other filters` : "");
    $("moreRows").hidden = rows.length >= matched;
    drawList();
    // On a phone the list comes first; beside it there is room for a sample.
    if (rows.some(row => row.sample_id === chosen)) await show(chosen, false);
    else if (!more && rows.length && matchMedia("(min-width: 900px)").matches) await show(rows[0].sample_id, false);
    else if (!more) { $("sample").hidden = true; chosen = ""; remember(); }
    document.body.dataset.ready = "1";
  } catch (error) { if (own === request) failed(error, () => list(more)); }
}
// Name of a group and the end of its prompt, with its success rate if all of its samples are in the list.
function headOf(group) {
  const own = rows.filter(row => row.group === group), judged = own.filter(row => isNumber(+row.correct) && row.correct !== null);
  const whole = !FIELDS.slice(1).some(name => !["any", "source", ""].includes(valueOf(name))) && (rows.length >= matched || rows.at(-1).group !== group);
  const head = element("li", (kind() === "eval" ? "problem " : "ticket ") + group + (whole && judged.length > 1 ? ` · ${judged.filter(row => row.correct).length} of ${judged.length} correct` : "") + (own[0].outcome ? ` · ${own[0].outcome}` : ""), "head");
  head.append(element("span", prompts[group], "prompt"));
  return head;
}
const kind = () => $("source").value.split(":")[0];
function drawList() {
  const longest = Math.max(1, ...rows.map(row => row.tokens));
  let before = null, outcome = "";
  $("list").replaceChildren(...rows.flatMap(row => {
    const head = row.group !== before && $("order").value === "source" ? [headOf(row.group)] : [];
    const first = row.group !== before;
    if (first) outcome = head.length ? row.outcome : "";
    before = row.group;
    const line = element("li"), button = element("button"), mark = MARKS[String(row.correct ?? null)];
    button.type = "button";
    button.dataset.id = row.sample_id;
    if (row.sample_id === chosen) button.setAttribute("aria-current", "true");
    const bar = element("i"), track = element("span", null, "length");
    bar.style.width = 100 * row.tokens / longest + "%";
    track.append(bar, element("span", number(row.tokens)));
    const sign = element("span", mark[0], "mark " + mark[1]);
    sign.title = mark[2];
    const name = head.length || $("order").value === "source" ? row.sample_id.split("/").at(-1) : row.sample_id.replace(/^0+(?=\d)/, "");
    button.append(sign, element("span", name, "id"), element("span", isNumber(row.reward) ? "reward " + brief(row.reward) : "no reward", "reward"), track,
      element("span", row.outcome ? "" : isNumber(row.staleness) ? row.staleness + " behind" : "", "soft"), element("span", row.truncated ? "cut" : "", "cut"));
    if (row.outcome && row.outcome !== outcome) button.append(element("span", row.outcome, "outcome"));
    button.onclick = () => show(row.sample_id, true);
    line.append(button);
    return [...head, line];
  }));
}
async function show(id, go) {
  const own = ++opening;
  try {
    const found = await load(`api/sample?source=${encodeURIComponent($("source").value)}&id=${encodeURIComponent(id)}`);
    if (own !== opening) return;
    shown = found;
    chosen = id;
    remember();
    for (const button of $("list").querySelectorAll("button")) button.toggleAttribute("aria-current", button.dataset.id === id);
    drawSample();
    $("sample").hidden = false;
    document.body.dataset.sample = id;
    if (go && !matchMedia("(min-width: 900px)").matches) $("sample").scrollIntoView();
  } catch (error) { if (own === opening) failed(error, () => show(id, go)); }
}
function drawSample() {
  const {row, turns, reference, note, facts} = shown, mark = MARKS[String(row.correct ?? null)];
  $("sampleId").textContent = row.sample_id;
  const parts = [`reward ${brief(row.reward)}`, `${number(row.tokens)} tokens`];
  if (isNumber(row.staleness)) parts.push(`${row.staleness} version${row.staleness === 1 ? "" : "s"} behind`);
  if (isNumber(row.advantage)) parts.push(`advantage ${row.advantage > 0 ? "+" : ""}${row.advantage.toPrecision(3)}`);
  $("verdictLine").replaceChildren(pill(mark[2], mark[1]), ...(row.truncated ? [pill("cut at its limit", "warn")] : []), ...(row.outcome ? [pill(row.outcome, "warn")] : []),
    element("span", parts.join("  ·  ")));
  $("reference").textContent = reference ?? (note ? "unknown: " + note : "unknown");
  $("reference").className = reference === null || reference === undefined ? "soft" : "";
  const scale = scaleOf(turns);
  drawTurns(turns, colour(), scale, valueOf("text"));
  tokenLegend(colour(), scale, turns);
  pairs("facts", facts);
}
function step(by) {
  const place = rows.findIndex(row => row.sample_id === chosen) + by;
  if (rows[place]) {
    show(rows[place].sample_id, false);
    $("list").querySelector(`[data-id="${CSS.escape(rows[place].sample_id)}"]`)?.scrollIntoView({block: "nearest"});
  }
}
function tip(event) {
  const token = event.target.closest("#turns span");
  $("tip").hidden = !token;
  if (token && shown) $("tip").textContent = tokenTip(shown.turns[token.dataset.turn], +token.dataset.i, token.dataset.place);
}
let typing;
$("filters").addEventListener("input", event => { clearTimeout(typing); typing = setTimeout(list, event.target.tagName === "INPUT" && event.target.type !== "checkbox" ? 350 : 0); });
$("filters").addEventListener("submit", event => event.preventDefault());
$("filters").addEventListener("reset", event => { event.preventDefault(); for (const name of FIELDS.slice(1)) $(name).type === "checkbox" ? $(name).checked = false : $(name).value = {verdict: "any", order: "source"}[name] || ""; list(); });
$("colours").addEventListener("change", () => { if (shown) { remember(); drawSample(); } });
$("turns").addEventListener("pointermove", tip);
$("turns").addEventListener("click", tip);
$("turns").addEventListener("pointerleave", () => { $("tip").hidden = true; });
$("moreRows").onclick = () => list(true);
$("back").onclick = () => { $("list").querySelector("[aria-current]")?.scrollIntoView({block: "center"}); };
$("previous").onclick = () => step(-1);
$("next").onclick = () => step(1);
addEventListener("keydown", event => {
  if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "j" || event.key === "ArrowDown") { event.preventDefault(); step(1); }
  if (event.key === "k" || event.key === "ArrowUp") { event.preventDefault(); step(-1); }
});
start();
