// The charts. They share one board: the step under the cursor, the range of steps, and how much curves are smoothed.

const PLOT = { height: 196, top: 10, right: 12, bottom: 22 };

class Board {
  constructor() {
    this.charts = [];
    this.range = null;
    this.cursor = null;
    this.pinned = false;
    this.smoothing = 0;
    this.listeners = [];
    this.look();
  }

  // The steps from and to which charts reach, and the rows of the table between them.
  look() {
    const { steps } = data;
    const [low, high] = this.range || [steps[0], steps[steps.length - 1]];
    this.span = low === high ? [low - 1, high + 1] : [low, high];
    this.rows = steps.map((_, row) => row).filter((row) => steps[row] >= this.span[0] && steps[row] <= this.span[1]);
  }

  shows(row) {
    return row >= this.rows[0] && row <= this.rows[this.rows.length - 1];
  }

  nearest(step) {
    let best = this.rows[0];
    for (const row of this.rows) {
      if (Math.abs(data.steps[row] - step) < Math.abs(data.steps[best] - step)) best = row;
    }
    return best;
  }

  // Without `pin` the cursor follows the pointer unless it is pinned; true pins it, false lets it go.
  point(row, pin) {
    if (pin === undefined && (this.pinned || row === this.cursor)) return;
    this.pinned = pin === true && row !== null;
    this.cursor = row;
    this.charts.forEach((chart) => chart.mark());
    this.listeners.forEach((listener) => listener(this));
  }

  show(change) {
    Object.assign(this, change);
    this.look();
    this.charts.forEach((chart) => chart.render());
    this.listeners.forEach((listener) => listener(this));
  }
}

class Chart {
  constructor(plan, board) {
    Object.assign(this, { plan, board, isLog: false, isShare: false, hidden: new Set() });
    this.svg = draw('svg', { class: 'plot', tabindex: 0, role: 'img', 'data-keys': true, 'aria-label': this.summary() });
    this.legend = make('div', { class: 'legend' });
    this.values = new Map();
    plan.series.forEach((series, place) => this.legend.append(this.legendItem(series, place)));
    this.node = make(
      'section', { class: 'card chart' },
      make('header', {}, make('h3', { text: plan.title }), this.switches()),
      plan.help ? make('p', { class: 'help', text: plan.help }) : null,
      this.svg,
      this.legend,
    );
    this.listen();
    board.charts.push(this);
    new ResizeObserver(() => this.render()).observe(this.svg);
  }

  summary() {
    const told = this.plan.series.map(({ key, label }) => {
      const known = data.columns[key].filter((value) => value !== null);
      const unit = this.plan.unit;
      return `${label} from ${figure(known[0], unit)} to ${figure(known[known.length - 1], unit)}`;
    });
    return `${this.plan.title}: ${told.join(', ')}`;
  }

  switches() {
    const box = make('div', { class: 'switches' });
    const add = (words, name) => {
      const button = make('button', { class: 'switch', type: 'button', 'aria-pressed': 'false', text: words });
      button.addEventListener('click', () => {
        this[name] = !this[name];
        button.setAttribute('aria-pressed', String(this[name]));
        this.render();
      });
      box.append(button);
    };
    if (this.plan.log && this.hasPositive()) add('log', 'isLog');
    if (this.plan.stack) add('share', 'isShare');
    return box;
  }

  // A figure that is often 0 or below has no place on a logarithmic scale.
  hasPositive() {
    const known = this.plan.series.flatMap(({ key }) => data.columns[key]).filter((value) => value !== null);
    return known.filter((value) => value > 0).length > 0.8 * known.length;
  }

  legendItem(series, place) {
    const value = make('b', { text: '' });
    this.values.set(series.key, value);
    const item = make(
      'button', { class: `item tone${place % 8}`, type: 'button', 'aria-pressed': 'true', title: series.key },
      make('i', {}), make('span', { text: series.label }), value,
    );
    item.addEventListener('click', () => {
      const isHidden = !this.hidden.delete(series.key);
      if (isHidden) this.hidden.add(series.key);
      item.setAttribute('aria-pressed', String(!isHidden));
      this.render();
    });
    return item;
  }

  // ---- What is drawn ---------------------------------------------------------------------------------------------

  // The known points of a figure in the visible range; one that follows a NaN begins a new piece of line.
  points(key) {
    const odd = new Set(data.nonfinite[key] || []);
    const points = [];
    let begins = false;
    for (const row of this.board.rows) {
      const value = data.columns[key][row];
      if (odd.has(data.steps[row]) && value === null) begins = true;
      if (value === null || (this.isLog && value <= 0)) continue;
      points.push([row, value, begins]);
      begins = false;
    }
    return points;
  }

  layers() {
    return this.plan.stack ? this.stackedLayers() : this.lineLayers();
  }

  lineLayers() {
    const past = this.board.smoothing;
    return this.visible().map(({ series, place }) => {
      const raw = this.points(series.key);
      const isDense = raw.length > 12;
      const line = isDense ? smooth(raw, past).map((point, at) => [point[0], point[1], raw[at][2]]) : raw;
      const layer = { series, place, line, faint: isDense && past ? raw : null, dots: raw.length <= 40 };
      if (series.band) {
        const spread = new Map(smooth(this.points(series.band), isDense ? past : 0));
        const inside = line.filter(([row]) => spread.has(row));
        layer.upper = inside.map(([row, value]) => [row, value + spread.get(row)]);
        layer.lower = inside.map(([row, value]) => [row, value - spread.get(row)]);
      }
      return layer;
    });
  }

  stackedLayers() {
    const visible = this.visible();
    const past = this.board.smoothing;
    const columns = visible.map(({ series }) => {
      const known = this.board.rows.map((row) => [row, Math.max(0, data.columns[series.key][row] || 0)]);
      return smooth(known, known.length > 12 ? past : 0);
    });
    const sums = this.board.rows.map((_, at) => columns.reduce((sum, column) => sum + column[at][1], 0));
    const scale = sums.map((sum) => (this.isShare ? (sum ? 1 / sum : 0) : 1));
    let base = this.board.rows.map((row) => [row, 0]);
    return visible.map(({ series, place }, number) => {
      const upper = base.map(([row, below], at) => [row, below + columns[number][at][1] * scale[at]]);
      const layer = { series, place, line: upper, upper, lower: base, solid: true };
      base = upper;
      return layer;
    });
  }

  visible() {
    return this.plan.series.map((series, place) => ({ series, place })).filter(({ series }) => !this.hidden.has(series.key));
  }

  extent(layers) {
    const known = layers.flatMap(({ line, faint, upper, lower }) => [line, faint || [], upper || [], lower || []].flat());
    let values = known.map(([, value]) => value);
    if (this.isLog) values = values.filter((value) => value > 0);
    if (!values.length) return [0, 1];
    let low = values.reduce((least, value) => Math.min(least, value), Infinity);
    let high = values.reduce((most, value) => Math.max(most, value), -Infinity);
    if (this.isLog) return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
    if (low === high) return low === 0 ? [0, 1] : [Math.min(0, low * 1.2), Math.max(0, high * 1.2)];
    if (low > 0 && low < 0.5 * high) low = 0;
    const room = (high - low) * 0.06;
    return [low === 0 ? 0 : low - room, high + (this.isShare ? 0 : room)];
  }

  render() {
    const width = this.svg.clientWidth;
    if (!width) return;
    const layers = this.layers();
    const [low, high] = this.extent(layers);
    const ticks = this.isLog ? logTicks(low, high, 5) : roundTicks(low, high, 4);
    const unit = this.isShare ? '%' : this.plan.unit === '%' ? '%' : '';
    const labels = ticks.map((tick) => figure(tick, unit));
    const left = 12 + 6.3 * Math.max(4, ...labels.map((label) => label.length));
    const bottom = PLOT.height - PLOT.bottom;
    const steps = linear(...this.board.span, left, width - PLOT.right);
    this.x = (row) => steps(data.steps[row]);
    this.y = (this.isLog ? logarithmic : linear)(low, high, bottom, PLOT.top);
    this.frame = { left, right: width - PLOT.right, bottom };
    this.svg.setAttribute('viewBox', `0 0 ${width} ${PLOT.height}`);
    this.cursorMarks = draw('g', { class: 'cursor' });
    this.selection = draw('rect', { class: 'selection', y: PLOT.top, height: bottom - PLOT.top, width: 0 });
    this.svg.replaceChildren(
      ...ticks.map((tick, place) => this.rule(this.y(tick), labels[place])),
      ...this.stepLabels(steps, width),
      ...layers.flatMap((layer) => this.shapes(layer)),
      ...this.oddMarks(),
      this.selection,
      this.cursorMarks,
    );
    this.drawn = layers;
    this.mark();
  }

  rule(y, label) {
    const { left, right } = this.frame;
    return draw(
      'g', { class: 'rule' },
      draw('line', { x1: left, x2: right, y1: y, y2: y }),
      draw('text', { x: left - 7, y: y + 3.5, 'text-anchor': 'end', text: label }),
    );
  }

  stepLabels(steps, width) {
    const [low, high] = this.board.span;
    const { left, right } = this.frame;
    const name = draw('text', { class: 'step', x: left - 7, y: PLOT.height - 6, 'text-anchor': 'end', text: 'step' });
    const ticks = stepTicks(low, high, Math.max(2, width / 80)).map((tick) => {
      const x = steps(tick);
      const anchor = x > right - 14 ? 'end' : x < left + 8 ? 'start' : 'middle';
      return draw('text', { class: 'step', x, y: PLOT.height - 6, 'text-anchor': anchor, text: tick.toLocaleString('en-US') });
    });
    return [name, ...ticks];
  }

  shapes({ line, faint, upper, lower, place, solid, dots }) {
    const tone = `tone${place % 8}`;
    const shapes = [];
    if (upper) shapes.push(draw('path', { class: `${solid ? 'area' : 'band'} ${tone}`, d: areaOf(upper, lower, this.x, this.y) }));
    if (faint) shapes.push(draw('path', { class: `faint ${tone}`, d: pathOf(faint, this.x, this.y) }));
    shapes.push(draw('path', { class: `${solid ? 'edge' : 'line'} ${tone}`, d: pathOf(line, this.x, this.y) }));
    if (dots && !solid) {
      line.forEach(([row, value]) => shapes.push(draw('circle', { class: `dot ${tone}`, cx: this.x(row), cy: this.y(value), r: 2.4 })));
    }
    return shapes;
  }

  oddMarks() {
    const [low, high] = this.board.span;
    const steps = linear(low, high, this.frame.left, this.frame.right);
    return this.visible().flatMap(({ series }) =>
      (data.nonfinite[series.key] || [])
        .filter((step) => step >= low && step <= high)
        .map((step) => draw(
          'text', { class: 'odd', x: steps(step), y: PLOT.top + 7, 'text-anchor': 'middle', text: '×' },
          draw('title', { text: `${series.label} was NaN or infinite at step ${step}` }),
        )));
  }

  // ---- The cursor ------------------------------------------------------------------------------------------------

  mark() {
    const { cursor } = this.board;
    const row = cursor === null ? data.steps.length - 1 : cursor;
    this.values.forEach((node, key) => { node.textContent = this.reading(key, row); });
    if (!this.cursorMarks || !this.frame) return;
    if (cursor === null || !this.board.shows(cursor)) {
      this.cursorMarks.replaceChildren();
      return;
    }
    const x = this.x(cursor);
    const marks = [draw('line', { x1: x, x2: x, y1: PLOT.top, y2: this.frame.bottom })];
    this.drawn.forEach(({ line, place }) => {
      const point = line.find(([at]) => at === cursor);
      if (point) marks.push(draw('circle', { class: `tone${place % 8}`, cx: x, cy: this.y(point[1]), r: 3.6 }));
    });
    this.cursorMarks.replaceChildren(...marks);
  }

  // What a figure was at a row: for one that is not written at every step, what it was last.
  reading(key, row) {
    const { unit } = this.plan;
    if ((data.nonfinite[key] || []).includes(data.steps[row]) && data.columns[key][row] === null) return 'NaN or ∞';
    const column = data.columns[key];
    let at = row;
    while (at >= 0 && column[at] === null) at -= 1;
    if (at < 0) return '–';
    return figure(column[at], unit) + (unit && unit !== '%' ? ` ${unit}` : '');
  }

  listen() {
    let start = null;
    const stepAt = (event) => {
      const box = this.svg.getBoundingClientRect();
      const [low, high] = this.board.span;
      const { left, right } = this.frame;
      const part = Math.min(1, Math.max(0, (event.clientX - box.left - left) / (right - left)));
      return low + part * (high - low);
    };
    const place = (event) => event.clientX - this.svg.getBoundingClientRect().left;
    this.svg.addEventListener('pointermove', (event) => {
      this.board.point(this.board.nearest(stepAt(event)));
      if (start === null) return;
      this.selection.setAttribute('x', Math.min(start.x, place(event)));
      this.selection.setAttribute('width', Math.abs(place(event) - start.x));
    });
    this.svg.addEventListener('pointerdown', (event) => {
      if (event.pointerType !== 'mouse' || event.button !== 0) return;
      start = { x: place(event), step: stepAt(event) };
      this.svg.setPointerCapture(event.pointerId);
    });
    this.svg.addEventListener('pointerup', (event) => {
      const [began, end] = [start, stepAt(event)];
      start = null;
      if (began !== null && Math.abs(place(event) - began.x) > 8) this.zoom(began.step, end);
      else this.board.point(this.board.nearest(end), !this.board.pinned || event.pointerType !== 'mouse');
    });
    this.svg.addEventListener('pointerleave', () => { if (start === null) this.board.point(null); });
    this.svg.addEventListener('dblclick', () => this.board.show({ range: null }));
    this.svg.addEventListener('keydown', (event) => this.key(event));
  }

  zoom(from, to) {
    const range = [Math.floor(Math.min(from, to)), Math.ceil(Math.max(from, to))];
    const inside = data.steps.filter((step) => step >= range[0] && step <= range[1]);
    this.board.show(inside.length > 1 ? { range } : {});
  }

  key(event) {
    const { rows, cursor } = this.board;
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    if (event.key === 'Escape') {
      this.board.point(null, true);
      this.board.show({ range: null });
    } else if (event.key in moves) {
      const at = cursor === null ? rows.length - 1 : rows.indexOf(cursor) + moves[event.key];
      this.board.point(rows[Math.min(rows.length - 1, Math.max(0, at))], true);
      event.preventDefault();
    }
  }
}
