"use strict";
// Curves over train steps, as SVG. All of them share one cursor.
const SVG = "http://www.w3.org/2000/svg", HEIGHT = 168, LEFT = 44, RIGHT = 8, TOP = 8, BOTTOM = 20;
function shape(tag, attributes, classes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (classes) made.setAttribute("class", classes);
  return made;
}
const paint = (node, property, colour) => { node.style[property] = colour; return node; };
function ticks(low, high, most) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const width = [1, 2, 2.5, 5, 10].find(x => x * power >= rough * .999) * power, found = [];
  for (let x = Math.ceil(low / width - 1e-9) * width; x <= high + width * 1e-6; x += width) found.push(Math.abs(x) < width * 1e-6 ? 0 : x);
  return found;
}
// Mean over `width` points around each, for curves of many steps: it does not lag behind the values.
function smooth(values, width) {
  if (width < 2) return values;
  return values.map((value, i) => {
    const near = values.slice(Math.max(0, i - (width >> 1)), i + (width >> 1) + 1).filter(isNumber);
    return isNumber(value) && near.length ? near.reduce((a, b) => a + b, 0) / near.length : null;
  });
}
const isSupervised = data => !!data && (data.columns.step || []).length > 0 && !data.columns.reward; // rows of data.demos have no reward
class Chart {
  // spec: {title, unit, format, series: [{column, label, colour}], band: [low, high], stacked, evaluations, from0, bound}
  constructor(spec, group) {
    Object.assign(this, {spec, group});
    this.card = element("div", null, "card chart");
    this.card.dataset.chart = spec.title;
    const head = element("h2", spec.title);
    head.append(element("span", spec.unit, "soft"));
    this.legend = element("div", null, "legend");
    this.svg = shape("svg", {role: "img", "aria-label": spec.title});
    this.card.append(head, this.legend, this.svg);
    this.svg.addEventListener("pointermove", event => group.point(this.stepAt(event)));
    this.svg.addEventListener("pointerleave", () => group.point(null));
  }
  stepAt(event) {
    if (!this.x) return null;
    const place = event.clientX - this.svg.getBoundingClientRect().left;
    return this.steps.reduce((best, step) => Math.abs(this.x(step) - place) < Math.abs(this.x(best) - place) ? step : best, this.steps[0]);
  }
  draw(data) {
    this.data = data;
    const {columns, marks, evaluations} = data, spec = this.spec;
    this.steps = columns.step || [];
    this.own = spec.series.filter(series => (columns[series.column] || []).some(isNumber));
    this.evals = spec.evaluations ? evaluations.filter(e => isNumber(e[spec.evaluations])) : [];
    this.svg.replaceChildren();
    const width = Math.max(120, this.svg.clientWidth || this.card.clientWidth - 28);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const xs = [...this.steps, ...evaluations.map(e => e.step).filter(isNumber)]; // the same axis for all charts
    const values = this.values();
    this.cursor = null;
    this.card.hidden = isSupervised(data) && !values.length;
    if (!xs.length || !values.length) {
      const none = shape("text", {x: width / 2, y: HEIGHT / 2, "text-anchor": "middle"}, "none");
      none.textContent = spec.none || "not measured yet";
      this.svg.append(none);
      this.x = null;
      return this.label(null);
    }
    this.scale(width, Math.min(...xs), Math.max(...xs), values);
    this.axes(width);
    if (isNumber(this.bound())) this.svg.append(shape("line", {x1: LEFT, x2: width - RIGHT, y1: this.y(this.bound()), y2: this.y(this.bound())}, "bound"));
    this.marked(marks);
    if (spec.stacked) this.stack(); else this.lines();
    this.dots();
    this.cursor = shape("line", {y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden"}, "cursor");
    this.svg.append(this.cursor);
    this.label(null);
  }
  bound() { return this.spec.bound && this.data[this.spec.bound]; }
  column(name) { return this.data.columns[name] || []; }
  // A batch of other lengths than the policy samples misleads: it is a hollow dot, and no part of the line.
  biased(i) { return this.spec.unbiased && (this.data.columns.biased || [])[i] === 1; }
  usual(values) { return values.map((value, i) => this.biased(i) ? null : value); }
  values() {
    const spec = this.spec;
    if (spec.stacked) return this.steps.map((_, i) => this.own.reduce((sum, s) => sum + (this.column(s.column)[i] || 0), 0)).concat(this.own.length ? [0] : []).filter(isNumber);
    const found = [...this.own.flatMap(s => this.column(s.column)), ...(spec.band || []).flatMap(name => this.column(name))];
    for (const e of this.evals) found.push(e[spec.evaluations], ...(spec.evaluations === "accuracy" && e.interval ? e.interval : []));
    return found.some(isNumber) ? [...found, this.bound()].filter(isNumber) : [];
  }
  scale(width, first, last, values) {
    let low = Math.min(...values), high = Math.max(...values);
    if (this.spec.from0) low = Math.min(0, low);
    if (this.spec.from0 && high === 0) high = this.spec.tick ? .01 : 1;
    if (low === high) { low -= Math.abs(low) * .1 || .5; high += Math.abs(high) * .1 || .5; }
    const room = (high - low) * .06, span = Math.max(1, last - first);
    this.low = this.spec.from0 && low === 0 ? 0 : low - room;
    this.high = high + room;
    [this.first, this.last] = [first, first + span];
    this.x = step => LEFT + (step - first) / span * (width - LEFT - RIGHT);
    this.y = value => TOP + (this.high - value) / (this.high - this.low) * (HEIGHT - TOP - BOTTOM);
  }
  axes(width) {
    for (const value of ticks(this.low, this.high, 4)) {
      const y = this.y(value), text = shape("text", {x: LEFT - 6, y: y + 4, "text-anchor": "end"});
      text.textContent = (this.spec.tick || this.spec.format)(value);
      this.svg.append(shape("line", {x1: LEFT, x2: width - RIGHT, y1: y, y2: y}, "grid"), text);
    }
    for (const step of ticks(this.first, this.last, Math.min(6, width / 70)).filter(Number.isInteger)) {
      const text = shape("text", {x: this.x(step), y: HEIGHT - 4, "text-anchor": "middle"});
      text.textContent = number(step);
      this.svg.append(text);
    }
    this.svg.append(shape("line", {x1: LEFT, x2: width - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM}, "axis"));
  }
  marked(marks) {
    let before = -9;
    for (const mark of marks) {
      const x = this.x(Math.min(this.last, Math.max(this.first, mark.step)));
      if (x - before < 2) continue; // several at one place are one line; the notes list all
      before = x;
      const title = shape("title", {}), line = shape("line", {x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM}, "mark");
      title.textContent = mark.text;
      const flag = shape("path", {d: `M${x - 4} ${TOP - 6}h8l-4 6z`}, "flag");
      flag.append(title);
      this.svg.append(line, flag);
    }
  }
  path(values) {
    let made = "", open = false;
    values.forEach((value, i) => {
      if (isNumber(value)) made += (open ? "L" : "M") + this.x(this.steps[i]).toFixed(1) + " " + this.y(value).toFixed(1);
      open = isNumber(value);
    });
    return made;
  }
  lines() {
    if (this.spec.band) {
      const [low, high] = this.spec.band.map(name => this.column(name)), at = i => this.x(this.steps[i]).toFixed(1);
      const known = this.steps.map((_, i) => i).filter(i => isNumber(low[i]) && isNumber(high[i]));
      const up = known.map(i => at(i) + " " + this.y(high[i]).toFixed(1)), down = known.reverse().map(i => at(i) + " " + this.y(low[i]).toFixed(1));
      this.svg.append(paint(shape("path", {d: "M" + [...up, ...down].join("L") + "Z"}, "band"), "fill", this.own[0] ? this.own[0].colour : ""));
    }
    this.width = this.steps.length > 60 ? Math.round(this.steps.length / 30) : 1;
    for (const series of this.own) {
      const values = this.usual(this.column(series.column));
      this.column(series.column).forEach((value, i) => {
        if (this.biased(i) && isNumber(value)) this.svg.append(paint(shape("circle", {cx: this.x(this.steps[i]), cy: this.y(value), r: 2.5}, "hollow"), "stroke", series.colour));
      });
      const joined = this.column(series.column).map((value, i) => [i - 1, i, i + 1].some(near => this.biased(near)) ? value : null);
      this.svg.append(paint(shape("path", {d: this.path(joined)}, "joined"), "stroke", series.colour));
      values.forEach((value, i) => { // a point without neighbours has no line to see
        if (isNumber(value) && !isNumber(values[i - 1]) && !isNumber(values[i + 1])) this.svg.append(paint(shape("circle", {cx: this.x(this.steps[i]), cy: this.y(value), r: 2.5}), "fill", series.colour));
      });
      if (this.width > 1) this.svg.append(paint(shape("path", {d: this.path(values)}, "raw"), "stroke", series.colour));
      this.svg.append(paint(shape("path", {d: this.path(smooth(values, this.width))}, "line"), "stroke", series.colour));
    }
  }
  stack() {
    let below = this.steps.map(() => 0);
    for (const series of this.own) {
      const above = this.column(series.column).map((value, i) => below[i] + (value || 0));
      const at = (values, i) => this.x(this.steps[i]).toFixed(1) + " " + this.y(values[i]).toFixed(1);
      const points = [...above.keys()];
      if (points.length === 1) this.svg.append(paint(shape("rect", {x: LEFT, width: 6, y: this.y(above[0]), height: this.y(below[0]) - this.y(above[0])}, "area"), "fill", series.colour));
      else this.svg.append(paint(shape("path", {d: "M" + [...points.map(i => at(above, i)), ...points.reverse().map(i => at(below, i))].join("L") + "Z"}, "area"), "fill", series.colour));
      below = above;
    }
  }
  dots() {
    const name = this.spec.evaluations, sets = [...new Set(this.evals.map(e => e.set))];
    sets.forEach((set, k) => {
      const own = this.evals.filter(e => e.set === set).sort((a, b) => a.step - b.step), colour = `var(--s${1 + k % 6})`;
      const points = own.map(e => `${this.x(e.step).toFixed(1)} ${this.y(e[name]).toFixed(1)}`);
      this.svg.append(paint(shape("path", {d: "M" + points.join("L")}, "line"), "stroke", colour));
      for (const e of own) {
        const x = this.x(e.step);
        if (name === "accuracy" && e.interval) this.svg.append(paint(shape("path", {d: `M${x} ${this.y(e.interval[0])}V${this.y(e.interval[1])}`}, "line"), "stroke", colour));
        const dot = paint(shape("circle", {cx: x, cy: this.y(e[name]), r: 3.5}), "fill", colour), title = shape("title", {});
        title.textContent = `${e.set} ${e.eval_id}, step ${e.step}: ${e.headline}`;
        dot.append(title);
        this.svg.append(dot);
      }
    });
  }
  label(step) {
    const at = step === null ? this.steps.length - 1 : this.steps.indexOf(step), made = [];
    if (step !== null) made.push(element("span", "step " + number(step) + (this.biased(at) ? ", biased" : "")));
    const recent = this.evals.length ? [...new Set(this.evals.map(e => e.set))].map((set, k) => {
      const own = this.evals.filter(e => e.set === set && (step === null || e.step <= step)).sort((a, b) => a.step - b.step).at(-1);
      return own && [own.held_out ? "held-out" : set, own[this.spec.evaluations], `var(--s${1 + k % 6})`];
    }).filter(Boolean) : [];
    const newest = s => this.usual(this.column(s.column)).findLast(isNumber) ?? this.column(s.column).findLast(isNumber);
    const shown = this.own.map(s => [s.label, step === null ? newest(s) : this.column(s.column)[at], s.colour]);
    if (isNumber(this.bound())) shown.push(["bound at the start", this.bound(), "var(--bad)"]);
    if (this.spec.band && at >= 0) shown.push(["range", this.spec.band.map(name => this.column(name)[at])]);
    for (const [label, value, colour] of [...recent, ...shown]) {
      const item = keyed(label + " ", colour);
      item.append(element("b", Array.isArray(value) ? value.map(this.spec.format).join(" to ") : isNumber(value) ? this.spec.format(value) : "–"));
      made.push(item);
    }
    if (step === null && this.steps.some((_, i) => this.biased(i))) {
      const note = element("span", "○ biased batch");
      note.title = "The completions of this batch are shorter or longer than those that the policy samples, as at a start and at the end. Its means mislead.";
      made.push(note);
    }
    this.legend.replaceChildren(...made);
    if (!this.cursor) return;
    this.cursor.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step !== null && this.x) for (const end of ["x1", "x2"]) this.cursor.setAttribute(end, this.x(step));
  }
}
class Charts {
  constructor(box, specs) {
    this.all = specs.map(spec => new Chart(spec, this));
    box.replaceChildren(...this.all.map(chart => chart.card));
    new ResizeObserver(() => this.data && this.draw(this.data)).observe(box);
  }
  draw(data) {
    this.data = data;
    for (const chart of this.all) chart.draw(data);
    if (this.pointed) this.point(this.pointed); // new data must not move the reader's place
  }
  point(step) {
    this.pointed = step;
    for (const chart of this.all) if (chart.x) chart.label(step !== null && chart.steps.includes(step) ? step : null);
  }
}
