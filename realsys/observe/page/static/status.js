"use strict";
const S1 = "var(--s1)", S2 = "var(--s2)", S3 = "var(--s3)", S4 = "var(--s4)", S5 = "var(--s5)", S6 = "var(--s6)";
const share = x => isNumber(x) ? (100 * x).toFixed(1) + " %" : "–", shareTick = x => number(100 * x, 2) + " %";
const PARTS = [["wait", "waits for batches", S3], ["inference", "inference", S4], ["train", "training", S1], ["save", "copy weights", S5], ["publish", "publish", S2], ["checkpoint", "checkpoint", S6]];
const SPECS = [
  {title: "Accuracy", unit: "held-out, and of the batch", evaluations: "accuracy", unbiased: true, format: share, tick: shareTick, series: [{column: "accuracy", label: "batch", colour: S6}]},
  {title: "Reward", unit: "mean of the batch", unbiased: true, format: brief, series: [{column: "reward", label: "mean", colour: S1}]},
  {title: "Completion length", unit: "tokens", unbiased: true, format: brief, series: [{column: "length", label: "mean", colour: S1}, {column: "length_correct", label: "correct", colour: S2}, {column: "length_wrong", label: "wrong", colour: S3}]},
  {title: "KL divergence", unit: "nats per token", from0: true, format: brief, series: [{column: "kl_step", label: "proximal to new", colour: S1}, {column: "kl_stale", label: "sampled to proximal", colour: S3}, {column: "kl_ref", label: "reference", colour: S4}]},
  {title: "Entropy", unit: "nats per token", format: brief, series: [{column: "entropy", label: "mean", colour: S1}]},
  {title: "Staleness", unit: "versions behind", from0: true, format: brief, band: ["stale_min", "stale_max"], bound: "max_staleness", series: [{column: "stale_mean", label: "mean", colour: S1}]},
  {title: "Tokens per second", unit: "trained tokens", from0: true, format: brief, series: [{column: "tokens_s", label: "end to end", colour: S1}, {column: "train_tokens_s", label: "while training", colour: S6}]},
  {title: "Time of a train step", unit: "seconds", stacked: true, from0: true, format: brief, series: PARTS.map(([column, label, colour]) => ({column, label, colour}))},
  {title: "Gradient norm", unit: "mean over optimizer steps", from0: true, format: brief, series: [{column: "grad_norm", label: "norm", colour: S1}]},
  {title: "Loss", unit: "objective", format: brief, series: [{column: "loss", label: "loss", colour: S1}]},
  {title: "Clipped tokens", unit: "share", from0: true, format: share, tick: shareTick, series: [{column: "clip", label: "of the loss", colour: S1}]},
  {title: "Cut completions", unit: "share that reached the limit", from0: true, format: share, tick: shareTick, series: [{column: "truncated", label: "cut", colour: S3}]},
];
const charts = new Charts($("charts"), SPECS);
const STATES = {running: "busy", done: "good", failed: "bad", killed: "bad", interrupted: "warn"};
let seen = -1, run = null, drawn = null;
const mean = values => values.length ? values.reduce((a, b) => a + b, 0) / values.length : undefined;
const lastOf = (column, count = 1) => mean(((drawn && drawn.columns[column]) || []).filter(isNumber).slice(-count));
// The same without the batches whose lengths are biased, unless all of them are: their means mislead, as on the curves.
function lastUnbiased(column, count) {
  const {biased = [], [column]: values = []} = (drawn && drawn.columns) || {};
  const recent = values.map((value, i) => [value, biased[i] === 1]).filter(([value]) => isNumber(value)).slice(-count);
  const unbiased = recent.filter(([, isBiased]) => !isBiased);
  return mean((unbiased.length ? unbiased : recent).map(([value]) => value));
}
function showRun(live) {
  const {progress: p, state} = run;
  $("name").textContent = `${run.experiment}/${run.trial}`;
  document.title = `${run.experiment}/${run.trial}` + (p.done ? ` · ${p.kind} ${p.done}` : "") + (state === "running" ? "" : " · " + state);
  $("state").textContent = state === "running" ? run.phase || "starting" : state;
  $("state").className = "pill " + (STATES[state] || "calm");
  $("phase").textContent = (p.total ? `${p.kind} ${number(p.done)} of ${number(p.total)}` : "")
    + (run.restarts ? `, ${run.restarts} restart${run.restarts > 1 ? "s" : ""}` : "") + (run.reason && state !== "done" ? `: ${run.reason}` : "");
  $("progress").firstElementChild.style.width = p.total ? 100 * p.done / p.total + "%" : "0";
  pairs("identity", run.identity);
  const about = Object.fromEntries(run.identity);
  $("about").textContent = ["model", "allocation", "engine", "folder"].map(name => about[name]).filter(Boolean).join("  ·  ");
  $("bottleneck").textContent = run.bottleneck ? run.bottleneck[0].toUpperCase() + run.bottleneck.slice(1) : "No train step yet.";
  table("evaluations", [["evaluation"], ["set"], ["step", "num"], ["result", "wrap"]],
    [...evaluationsThatRun(live), ...run.evaluations.map(e => [e.eval_id, e.set, number(e.step), e.incomplete ? pill(e.headline, "warn") : e.headline])], "none yet", 8);
  $("notesOf").textContent = run.notes.length ? "newest first" : "";
  $("notes").replaceChildren(...(run.notes.length ? run.notes.map(noteLine) : [element("li", "none", "soft")]));
  if (run.ledger) showLedger(run.ledger);
}
// Short completions end first, so an accuracy of those that have ended would mislead: only their number is shown.
function evaluationsThatRun(live) {
  return Object.entries(live ? live.evaluations : {}).filter(([, e]) => !e.ended).map(([name, e]) => [name, e.set || "", "", pill(`${number(e.done)} of ${number(e.total)} done`, "busy")]);
}
function noteLine(event) {
  const line = element("li"), when = new Date(1000 * event.time), time = element("time", when.toLocaleTimeString("en-GB"));
  time.title = when.toString();
  const kind = element("b", event.kind === "note" ? "" : event.kind.replace("_", " "), {restart: "warn", gave_up: "bad"}[event.kind] || "");
  line.append(time, kind, (event.process && !event.text.startsWith(event.process) ? event.process + ": " : "") + event.text);
  return line;
}
function showTiles(live) {
  const tile = (name, value, note) => {
    const made = element("div", null, "card tile");
    made.append(element("h2", name), element("b", value), element("span", note));
    return made;
  };
  const judged = run.evaluations.filter(e => isNumber(e.accuracy)), sampled = judged.filter(e => e.held_out);
  const supervised = isSupervised(drawn), done = sampled.length ? sampled : judged, first = done.at(-1), best = done[0];
  const gain = best && first && best !== first ? `${best.accuracy >= first.accuracy ? "+" : "−"}${Math.abs(100 * (best.accuracy - first.accuracy)).toFixed(1)} points since step ${first.step}` : best ? `at step ${best.step}` : "no evaluation yet";
  const steps = (drawn && drawn.columns.step) || [], some = steps.length ? steps.at(-1) - (steps.at(-11) ?? steps[0] - 1) : 0; // a point of a long run has several steps
  const over = some > 1 ? `mean of the last ${number(some)} steps` : "last step";
  const tps = lastOf("tokens_s", 10), running = live ? live.throughput.generated_tokens_per_s : null;
  $("tiles").replaceChildren(
    tile("Held-out accuracy", best ? percent(best.accuracy) : "–", gain),
    supervised ? tile("Loss", brief(lastOf("loss", 10)), over) : tile("Reward", brief(lastUnbiased("reward", 10)), over),
    tile("Length", brief(lastUnbiased("length", 10)), "tokens, " + over),
    tile("Entropy", brief(lastOf("entropy", 10)), supervised ? "nats per token" : `nats per token; KL ${brief(lastOf("kl_step", 10))}`),
    tile("Tokens/s", brief(tps), running === null ? "trained, end to end" : `trained; ${brief(running)} sampled`),
    ...(supervised ? [] : [tile("Staleness", brief(lastOf("stale_mean", 10)), `mean; most ${brief(lastOf("stale_max"))}; bound ${run.max_staleness} when a group starts`)]));
  $("staleness").closest(".card").hidden = supervised;
}
const SPLIT = {wait: ["waits for batches", S3], switch: ["waits for shared devices", S2], inference: ["inference", S4], train: ["training", S1], copy: ["copies weights", S5], publish: ["publishes", S2], checkpoint: ["checkpoints", S6], other: ["plans, transfers", S6], between: ["evaluations and other pauses", S5]};
function showSplit() {
  const {steps, parts: named} = run.split;
  const parts = Object.entries(SPLIT).filter(([name]) => named[name]).map(([name, [label, colour]]) => [label, named[name][0], colour, named[name][1]]);
  const whole = parts.reduce((sum, part) => sum + part[1], 0);
  $("splitOf").textContent = whole ? `last ${steps} steps, ${seconds(whole / steps)} each` : "";
  stack("split", parts, whole);
  const small = parts.filter(part => !part[3]).map(part => part[0]);
  $("splitLegend").replaceChildren(...parts.filter(part => part[3]).map(([label, , colour, percents]) => keyed(`${label} ${percents} %`, colour)),
    ...(small.length ? [element("span", `under 1 %: ${small.join(", ")}`, "soft")] : []));
}
function showClients(serve) {
  $("clientsCard").hidden = !serve;
  for (const id of ["tiles", "bottleneckCard", "charts", "samplesLink"]) $(id).hidden = Boolean(serve);
  if (!serve) return;
  for (const id of ["evaluations", "ledger", "staleness"]) $(id).closest(".card").hidden = true;
  $("clientsOf").textContent = "base_url=" + serve.url;
  table("clients", [["owner"], ["model"], ["steps", "num"], ["calls", "num"], ["tokens", "num"], ["waiting", "num"], ["last error", "wrap error"]],
    serve.models.map(m => [m.owner, m.model, number(m.steps), number(m.calls), number(m.tokens), number(m.waiting), m.last_error || ""]), "none yet");
}
function showLive(s) {
  showClients(s?.master?.serve);
  for (const part of document.querySelectorAll(".live")) part.hidden = !s;
  const bad = s ? s.servers.filter(r => r.state === "quarantined" || r.state === "suspected").length : 0;
  $("trouble").hidden = !bad;
  $("trouble").textContent = `${bad} of ${s ? s.servers.length : 0} servers in trouble`;
  const last = run.last_step;
  if (!s) return showStaleness((last.staleness || {}).histogram || {}, last.untrained, last.agreement, 0);
  $("stalenessOf").textContent = "sequences of the last steps by versions behind";
  showGauge(s.admission, s.ledger);
  showServers(s);
  showUpdates(s.rollout);
  showLedger(s.ledger);
  showStaleness(s.staleness.histogram, s.untrained.untrained, s.agreement, s.kept_keys_fraction);
  showWorkers(s);
}
async function refresh() {
  let pause = 2000;
  try {
    const curves = await load("curves?seen=" + seen); // first: the evaluations of the run must be as new as the curves
    const [newRun, live] = await Promise.all([load("run"), load("live")]);
    run = newRun;
    if (curves.columns) {
      seen = curves.seen;
      drawn = {...curves, evaluations: run.evaluations, max_staleness: run.max_staleness};
      charts.draw(drawn);
    }
    showRun(live);
    showTiles(live);
    showSplit();
    showLive(live);
    withKey($("samplesLink"));
    $("gone").hidden = true;
    document.body.dataset.ready = "1";
    if (run.state !== "running") pause = 15000;
  } catch (error) {
    if (error instanceof NeedsKey) return askForKey(refresh);
    $("gone").hidden = false;
    $("gone").title = String(error);
    console.warn(error);
  }
  setTimeout(refresh, document.hidden ? 15000 : pause);
}
refresh();
