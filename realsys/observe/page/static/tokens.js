"use strict";
// The tokens of a sample, coloured. Shared state: `shown`, the sample.
const TINTS = ["--s1", "--s2", "--s3", "--s4", "--s5", "--s6"];
const MOST_TOKENS = 6000; // drawn at first
const mix = (colour, share) => `color-mix(in srgb, ${colour} ${Math.round(100 * share)}%, transparent)`;
const at = (values, i) => !values || !values.length ? undefined : values.length === 1 ? values[0] : values[i];
const colourOf = {
  none: () => "",
  version: (turn, i, scale) => isNumber(at(turn.versions, i)) ? mix(`var(${TINTS[scale.versions.indexOf(at(turn.versions, i)) % 6]})`, .26) : "",
  logprob: (turn, i) => isNumber(at(turn.logprobs, i)) ? mix("var(--s3)", Math.min(.8, -at(turn.logprobs, i) / 5)) : "",
  advantage: (turn, i, scale) => {
    const value = at(turn.advantages, i);
    return !value ? "" : mix(value > 0 ? "var(--s1)" : "var(--s3)", .1 + .55 * Math.abs(value) / scale.advantage);
  },
};
function scaleOf(turns) {
  const counts = new Map();
  let most = 0;
  for (const turn of turns) {
    turn.pieces.forEach((_, i) => { const v = at(turn.versions || [], i); if (isNumber(v)) counts.set(v, (counts.get(v) || 0) + 1); });
    for (const value of turn.advantages || []) most = Math.max(most, Math.abs(value));
  }
  return {versions: [...counts.keys()].sort((a, b) => a - b), counts, advantage: most || 1};
}
function tokenLegend(by, scale, turns) {
  const has = name => turns.some(turn => (turn[name] || []).length);
  const items = by === "version" ? scale.versions.map((v, k) => keyed(`v${v}: ${number(scale.counts.get(v))} tokens`, `var(${TINTS[k % 6]})`))
    : by === "logprob" && has("logprobs") ? [keyed("probable", mix("var(--s3)", .03)), keyed("p = 37 %", mix("var(--s3)", .2)), keyed("p = 8 %", mix("var(--s3)", .5)), keyed("p < 2 %", mix("var(--s3)", .8))]
    : by === "advantage" && has("advantages") ? [keyed("to be more probable", "var(--s1)"), keyed("to be less probable", "var(--s3)"), element("span", `largest ${scale.advantage.toPrecision(3)}`)] : [];
  if (!items.length && by !== "none") items.push(element("span", `The ${by === "logprob" ? "log-probs" : by + "s"} of these tokens are not stored.`, "soft"));
  if (turns.some(turn => turn.kind === "masked")) items.push(element("span", "struck out: sampled, too old to be trained", "soft"));
  if (turns.some(turn => turn.kind === "context")) items.push(element("span", "grey: given, not trained", "soft"));
  $("tokenLegend").replaceChildren(...items);
}
const NAMES = {prompt: "prompt", context: "given, not trained", sampled: "completion", masked: "sampled, too old to be trained"};
// Numbers of the pieces that hold a part of the searched text; small and capital letters are equal.
function hits(pieces, wanted) {
  const found = new Set(), lowered = pieces.map(piece => piece.toLowerCase()), text = lowered.join(""), needle = wanted.toLowerCase();
  let i = 0, end = lowered.length ? lowered[0].length : 0; // of piece i
  for (let at = needle ? text.indexOf(needle) : -1; at >= 0; at = text.indexOf(needle, at + needle.length)) {
    while (end <= at) end += lowered[++i].length;
    for (found.add(i); end < at + needle.length; found.add(i)) end += lowered[++i].length;
  }
  return found;
}
function drawTurns(turns, by, scale, wanted) {
  let budget = MOST_TOKENS, place = 0;
  $("turns").replaceChildren(...turns.map((turn, number_) => {
    const box = element("div", null, "turn " + turn.kind), text = element("pre");
    const marked = hits(turn.pieces, wanted), count = turn.pieces.length > 1 ? ` · ${number(turn.pieces.length)} tokens` : "";
    box.append(element("h2", NAMES[turn.kind] + count), text);
    const start = place;
    place += turn.pieces.length;
    const draw = most => {
      const many = document.createDocumentFragment();
      turn.pieces.slice(0, most).forEach((piece, i) => {
        const made = element("span", piece, marked.has(i) ? "hit" : ""), colour = colourOf[by](turn, i, scale);
        if (colour) made.style.background = colour;
        made.dataset.turn = number_;
        made.dataset.i = i;
        made.dataset.place = start + i;
        many.append(made);
      });
      text.replaceChildren(many);
      if (most < turn.pieces.length) {
        const all = element("button", `show ${number(turn.pieces.length - most)} more tokens`);
        all.type = "button";
        all.onclick = () => draw(turn.pieces.length);
        text.append("\n", all);
      }
    };
    draw(Math.max(200, budget));
    budget -= turn.pieces.length;
    return box;
  }));
}
function tokenTip(turn, i, place) {
  const v = at(turn.versions || [], i), p = at(turn.logprobs || [], i), a = at(turn.advantages || [], i);
  const parts = [JSON.stringify(turn.pieces[i]), `token ${place}`];
  if (isNumber(v)) parts.push("v" + v);
  if (isNumber(p)) parts.push(`log-prob ${p.toFixed(4)} (p ${percent(Math.exp(p), Math.exp(p) < .01 ? 3 : 1)})`);
  if (isNumber(a)) parts.push(`advantage ${a.toPrecision(4)}`);
  if (!isNumber(v)) parts.push(NAMES[turn.kind]);
  return parts.join("  ·  ");
}
