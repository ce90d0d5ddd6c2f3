"use strict";
// Tables and bars of the status page.
const opened = new Set(); // tables that show all of their rows
function table(id, heads, rows, empty, most = 12) {
  const head = element("tr"), shown = opened.has(id) ? rows : rows.slice(0, most);
  for (const [name, classes] of heads) head.append(element("th", name, classes));
  const lines = shown.map(cells => {
    const line = element("tr");
    cells.forEach((cell, i) => {
      const box = element("td", null, heads[i][1]);
      box.append(cell instanceof Node ? cell : String(cell));
      line.append(box);
    });
    return line;
  });
  if (rows.length > most) {
    const line = element("tr"), box = element("td", null, "all"), all = element("button", opened.has(id) ? "show the first " + most : "show all " + rows.length);
    all.type = "button";
    all.onclick = () => { opened.has(id) ? opened.delete(id) : opened.add(id); table(id, heads, rows, empty, most); };
    box.colSpan = heads.length;
    box.append(all);
    line.append(box);
    lines.push(line);
  }
  $(id).replaceChildren(...(rows.length ? [head, ...lines] : [element("caption", empty)]));
}
function bars(id, rows, empty) {
  const most = Math.max(1e-9, ...rows.map(row => row[1]));
  const made = rows.flatMap(([name, value, shown, colour]) => {
    const track = element("div"), bar = element("i");
    bar.style.width = 100 * value / most + "%";
    if (colour) bar.style.setProperty("--c", colour);
    track.append(bar);
    return [element("span", name), track, element("span", shown === undefined ? number(value) : shown, "num")];
  });
  $(id).replaceChildren(...(rows.length ? made : [element("span", empty, "soft")]));
}
function stack(id, parts, whole) {
  $(id).replaceChildren(...parts.filter(part => part[1] > 0).map(([, value, colour]) => {
    const bar = element("i");
    bar.style.width = Math.min(100, 100 * value / whole) + "%";
    bar.style.background = colour;
    return bar;
  }));
}
// Trouble first: a server that needs attention is never below the ones that do not.
const TROUBLE = {quarantined: 0, suspected: 1, registered: 2, updating: 3, draining: 3, ready: 4};
const KINDS = {ready: "good", updating: "busy", draining: "busy", registered: "calm", suspected: "warn", quarantined: "bad"};
function showServers(s) {
  const rank = r => (TROUBLE[r.state] ?? 2) - (r.error ? .5 : 0);
  const sorted = [...s.servers].sort((a, b) => rank(a) - rank(b) || a.name.localeCompare(b.name, "en", {numeric: true}));
  const usable = s.servers.filter(r => r.version !== null && r.state !== "quarantined").length;
  const bad = s.servers.filter(r => r.state === "quarantined" || r.state === "suspected").length;
  $("serversOf").textContent = `${usable} of ${s.servers.length} usable` + (bad ? `, ${bad} in trouble` : "")
    + `, ${number(s.throughput.generated_tokens_per_s)} finished tokens/s`
    + (s.devices.turn === "unknown" ? "" : `; shared devices: ${s.devices.turn} (${s.devices.reason})`)
    + Object.entries(s.pins).map(([name, pin]) => `; ${name} is version ${pin.version} on ${pin.servers.join(", ") || "no server yet"}`).join("");
  table("servers", [["server"], ["state"], ["version", "num"], ["running", "num"], ["queued", "num"], ["tokens/s", "num"], ["KV in use", "num"],
    ["memory", "num"], ["last update", "num"], ["pause", "num"], ["address"], ["last error", "wrap error"]],
    sorted.map(r => [r.name, pill(r.target !== null && r.state === "updating" ? "updating to " + r.target : r.state, KINDS[r.state] || "calm"),
      r.version === null ? "–" : r.version, number(r.running), r.load ? number(r.load.queued) : "–", number(r.tokens_per_s),
      r.load && r.load.kv_capacity ? number(100 * r.load.kv_tokens / r.load.kv_capacity) + " %" : "–",
      bytes(r.load && r.load.memory_bytes), r.updates ? seconds(r.update_s) : "–", seconds(r.timings.pause_s), r.url, r.error || ""]), "no server has registered yet", 8);
}
function showUpdates(r) {
  $("updatesOf").textContent = (r.mode === "rolling" ? "in turns, " + number(100 * r.fraction) + " % at a time" : "all servers together") + ", "
    + number(r.at_newest) + " of " + number(r.servers) + " at the newest version" + (r.failures ? ", " + number(r.failures) + " failed" : "");
  table("updates", [["server"], ["version", "num"], ["total", "num"], ["stage", "num"], ["of it verify", "num"], ["pause", "num"], ["of it load", "num"],
    ["first token after", "num"], ["error", "wrap error"]],
    r.updates.map(u => [u.server, u.version, seconds(u.total_s), seconds(u.stage_s), seconds(u.verify_s), seconds(u.pause_s),
      seconds(u.load_s), seconds(u.first_token_s), u.error]), "none yet", 4);
}
function showWorkers(s) {
  const blamed = w => Boolean(s.blame.suspects[w.name]);
  const refused = w => Object.entries(w.refused || {}).map(([what, n]) => n + " " + what).join(", ");
  const sorted = [...s.workers].sort((a, b) => blamed(b) - blamed(a) || (refused(b) !== "") - (refused(a) !== ""));
  $("workersOf").textContent = number(s.workers.length) + " processes";
  table("workers", [["worker"], ["state"], ["running", "num"], ["memory", "num"], ["up", "num"], ["unchanged for", "num"], ["host"], ["refused", "wrap"]],
    sorted.map(w => [w.name, blamed(w) ? pill("reports servers that answer", "bad") : w.state || "–",
      w.kind === "rollout_worker" ? number(w.running) : "–", bytes(w.memory_bytes), seconds(w.up_s), seconds(w.unchanged_s), `${w.host} ${w.pid}`, refused(w)]), "no heartbeat seen yet");
}
function showGauge(a, ledger) {
  const open = [["finished, not trained", ledger.finished, "var(--good)"], ["claimed", ledger.claimed || 0, "var(--s4)"], ["running", ledger.running, "var(--accent)"]];
  // The bound counts every group since the start of the trial; the trained and inherited ones are a base that is never shown.
  const inside = open.reduce((sum, part) => sum + part[1], 0), whole = Math.max(1, inside + Math.max(0, a.headroom));
  stack("gauge", open, whole);
  $("gaugeLegend").replaceChildren(...open.filter(part => part[1] > 0).map(([name, value, colour]) => keyed(number(value) + " " + name, colour)),
    keyed(number(Math.max(0, a.headroom)) + " may start", "var(--track)"));
  $("why").replaceChildren(pill(a.admits ? "granting" : a.reason, a.admits ? "good" : a.reason === "no_server" ? "bad" : "warn"), a.admits ? "" : " " + a.explanation);
}
function showLedger(l) {
  if (!l) return bars("ledger", [], "the ledger cannot be read");
  $("ledgerOf").textContent = number(l.granted) + " granted" + (l.inherited ? ", " + number(l.inherited) + " inherited" : "");
  bars("ledger", [["trained", l.trained, undefined, "var(--good)"], ...["finished", "claimed", "running", "waiting"].map(name => [name, l[name] || 0]),
    ...Object.entries(l.dropped_by_reason).map(([why, n]) => ["dropped: " + why, n, undefined, "var(--warn)"]),
    ...Object.entries(l.reissued_by_cause).map(([why, n]) => ["reissued: " + why, n, undefined, "var(--s6)"])].filter(row => row[1] > 0), "nothing granted yet");
}
function showStaleness(steps, last, agreement, kept) {
  const total = Object.values(steps).reduce((a, b) => a + b, 0);
  bars("staleness", Object.entries(steps).map(([lag, n]) => [lag, n, number(n) + "  (" + number(100 * n / total) + " %)"]), "nothing trained yet");
  bars("untrained", Object.entries(last || {}).filter(([, share]) => share > 0).map(([why, share]) => [why.replaceAll("_", " "), share, percent(share, 0), "var(--warn)"]), "none");
  const small = x => isNumber(x) ? x.toExponential(1) : "–", a = agreement;
  $("agreement").replaceChildren(...(!a ? ["no train step yet"] : !a.tokens ? ["the last batch has no token of version " + a.version]
    : [pill(a.warning ? "drifts apart" : "agree", a.warning ? "bad" : "good"), ` mean ${small(a.difference_mean)}, max ${small(a.difference_max)} nats over ${number(a.tokens)} tokens of version ${a.version}. `, a.warning]),
    kept ? ` ${percent(kept)} of the tokens on kept keys were not compared.` : "");
}
