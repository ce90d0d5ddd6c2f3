"use strict";
// Shared by both pages. Every value is set as text: what a run reports never becomes markup.
const $ = id => document.getElementById(id);
const ROOT = document.body.dataset.root; // path from this page to /view/
const isNumber = x => typeof x === "number" && isFinite(x);
const number = (x, digits = 0) => isNumber(x) ? x.toLocaleString("en-US", {maximumFractionDigits: digits}) : "–";
const percent = (x, digits = 1) => isNumber(x) ? (100 * x).toFixed(digits) + " %" : "–";
const bytes = x => !isNumber(x) || x === 0 ? "–" : x >= 2 ** 30 ? (x / 2 ** 30).toFixed(1) + " GiB" : number(x / 2 ** 20) + " MiB";
const seconds = s => !isNumber(s) ? "–" : s < 1 ? (s * 1000).toFixed(0) + " ms" : s < 120 ? s.toFixed(1) + " s"
  : s < 7200 ? Math.floor(s / 60) + " min" : (s / 3600).toFixed(1) + " h";
// A number of unknown size with three significant digits.
const brief = x => !isNumber(x) ? "–" : x === 0 ? "0" : Math.abs(x) >= 1e6 ? +(x / 1e6).toPrecision(3) + "M"
  : Math.abs(x) >= 1e4 ? +(x / 1e3).toPrecision(3) + "k" : Math.abs(x) >= 100 ? number(x) : Math.abs(x) >= 1e-3
  ? String(+x.toPrecision(3)) : x.toExponential(1);
function element(tag, text, classes) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text;
  if (classes) made.className = classes;
  return made;
}
const pill = (text, kind) => element("span", text, "pill " + kind);
const fragment = () => new URLSearchParams(location.hash.slice(1));
function pairs(id, rows) {
  $(id).replaceChildren(...rows.flatMap(([name, value]) => [element("dt", name), element("dd", value)]));
}
function keyed(text, colour) {
  const made = element("span", text, "key");
  made.style.setProperty("--c", colour);
  return made;
}
// The key comes with the fragment of the address, which a browser never sends. The tab remembers it.
if (fragment().get("key")) sessionStorage.setItem("key", fragment().get("key"));
const key = () => sessionStorage.getItem("key") || "";
class NeedsKey extends Error {}
async function load(path, timeout = 20000) {
  const headers = key() ? {Authorization: "Bearer " + key()} : {};
  const answer = await fetch(ROOT + path, {cache: "no-store", headers, signal: AbortSignal.timeout(timeout)});
  if (answer.status === 401) throw new NeedsKey();
  const body = await answer.json().catch(() => ({})); // a server that fails answers with plain text
  if (!answer.ok) throw new Error(body.error || "status " + answer.status);
  return body;
}
function askForKey(again) {
  if ($("keyForm")) $("keyForm").remove();
  const form = element("form", null, "card"), label = element("label"), row = element("div", null, "row");
  const input = element("input"), button = element("button", "Open");
  form.id = "keyForm";
  label.htmlFor = input.id = "key";
  label.append("This page needs its key: the end of the address that ", element("code", "realsys view"),
    " printed, or the contents of the file ", element("code", "token"), " in the trial's folder.");
  Object.assign(input, {type: "password", autocomplete: "off"});
  row.append(input, button);
  form.append(label, row);
  form.onsubmit = event => {
    event.preventDefault();
    sessionStorage.setItem("key", input.value.trim());
    form.remove();
    delete document.body.dataset.locked;
    again();
  };
  document.querySelector("header").after(form);
  document.body.dataset.locked = "1"; // nothing else can be used before there is a key
}
const withKey = link => { if (key()) link.href = link.getAttribute("href").split("#")[0] + "#key=" + encodeURIComponent(key()); };
