// The tokens of one completion, coloured by what is asked for, each with its numbers under the pointer.

const MODES = [
  { name: 'difference', label: 'trainer − sampler', needs: ['trainer', 'sampler'], ranges: [0.05, 0.2, 0.5, 1, 2] },
  { name: 'sampler', label: 'how unlikely it was', needs: ['sampler'], ranges: [2, 5, 10] },
  { name: 'reference', label: 'policy − reference', needs: ['reference', 'sampler'], ranges: [0.2, 1, 2, 5] },
  { name: 'version', label: 'version of the weights', needs: ['versions'], ranges: [] },
];

function difference(item, at) {
  if (!item.trainer || !item.sampler || item.trainer[at] === null || item.sampler[at] === null) return null;
  return item.trainer[at] - item.sampler[at];
}

function differences(item) {
  if (item.gaps === undefined) {
    const known = item.pieces.map((_, at) => difference(item, at)).filter((value) => value !== null);
    item.gaps = known.length
      ? { mean: known.reduce((sum, value) => sum + Math.abs(value), 0) / known.length, largest: known.reduce((most, value) => (Math.abs(value) > Math.abs(most) ? value : most), 0) }
      : null;
  }
  return item.gaps;
}

function versionAt(item, at) {
  const span = item.versions.find(([, start, end]) => at >= start && at < end);
  return span ? span[0] : null;
}

function has(item, mode) {
  return mode.needs.every((name) => item[name] && item[name].length);
}

class TokenView {
  constructor() {
    this.mode = 'difference';
    this.ranges = new Map(MODES.map((mode) => [mode.name, mode.ranges[Math.min(2, mode.ranges.length - 1)]]));
    this.tip = make('div', { class: 'tip', role: 'status', hidden: true });
    document.body.append(this.tip);
    document.addEventListener('scroll', () => this.hide(), { passive: true, capture: true });
  }

  show(item, box) {
    const usable = MODES.filter((mode) => has(item, mode));
    const mode = usable.find(({ name }) => name === this.mode) || usable[0] || null;
    const again = () => this.show(item, box);
    const body = isEpisode(item) ? new Conversation(item, (_, turn) => this.text(item, mode, turn)).node : this.text(item, mode, null);
    box.replaceChildren(this.controls(item, usable, mode, again), body, ...this.remarks(item));
    this.hide();
  }

  controls(item, usable, mode, again) {
    const bar = make('div', { class: 'tokenbar' });
    if (!mode) return bar;
    const modes = make('select', { 'aria-label': 'Colour of tokens' });
    usable.forEach(({ name, label }) => modes.append(make('option', { value: name, text: label, selected: name === mode.name })));
    modes.addEventListener('change', () => { this.mode = modes.value; again(); });
    bar.append(make('label', {}, 'Colour: ', modes));
    if (!mode.ranges.length) {
      bar.append(this.versionLegend(item));
      return bar;
    }
    const range = this.ranges.get(mode.name);
    const ranges = make('select', { 'aria-label': 'Range of the colours, in nats' });
    mode.ranges.forEach((value) => ranges.append(make('option', { value, text: `±${value}`.replace('±', mode.name === 'sampler' ? 'to −' : '±'), selected: value === range })));
    ranges.addEventListener('change', () => { this.ranges.set(mode.name, Number(ranges.value)); again(); });
    const ends = mode.name === 'sampler' ? ['certain', `−${range} nats`] : [`−${range} less likely`, `more likely +${range}`];
    bar.append(
      make('label', {}, 'Range: ', ranges),
      make('span', { class: 'scale' }, make('span', { text: ends[0] }), make('i', { class: mode.name === 'sampler' ? 'ramp one' : 'ramp two' }), make('span', { text: ends[1] })),
    );
    return bar;
  }

  versionLegend(item) {
    const versions = [...new Set(item.versions.map(([version]) => version))];
    return make('span', { class: 'scale' }, ...versions.map((version, place) => make('span', { class: `version tone${place % 8}`, text: `v${version}` })));
  }

  // The tokens of one turn, or of the whole sample.
  text(item, mode, turn) {
    const body = make('div', { class: 'tokens', 'data-test': 'tokens' });
    if (!item.pieces.length || (turn && turn.start === turn.end)) {
      body.append((turn ? turn.text : item.text) || '');
      return body;
    }
    const from = turn ? turn.start : 0;
    const shown = item.pieces.slice(from, turn ? turn.end : undefined);
    shown.forEach((piece, place) => body.append(this.token(item, mode, piece, from + place)));
    if (turn && shown.length < turn.end - turn.start) body.append(make('small', { text: ` … ${turn.end - turn.start - shown.length} more tokens` }));
    const find = (event) => (event.target instanceof Element ? event.target.closest('.token') : null);
    body.addEventListener('pointerover', (event) => { const node = find(event); if (node) this.point(item, node); });
    body.addEventListener('click', (event) => { const node = find(event); if (node) this.point(item, node); });
    body.addEventListener('pointerleave', () => this.hide());
    return body;
  }

  token(item, mode, piece, at) {
    const node = make('span', { class: piece === '' ? 'token hollow' : 'token', 'data-at': at });
    piece.split('\n').forEach((line, place) => {
      if (place > 0) node.append(make('span', { class: 'newline', text: '↵' }), '\n');
      node.append(line);
    });
    const colour = mode ? this.colour(item, mode, at) : null;
    if (colour) node.style.backgroundColor = colour;
    return node;
  }

  colour(item, mode, at) {
    const range = this.ranges.get(mode.name);
    const mixed = (name, part) => `color-mix(in srgb, var(${name}) ${Math.round(85 * Math.min(1, part))}%, transparent)`;
    if (mode.name === 'version') {
      const place = item.versions.findIndex(([, start, end]) => at >= start && at < end);
      const versions = [...new Set(item.versions.map(([version]) => version))];
      return place < 0 ? null : mixed(`--tone${versions.indexOf(item.versions[place][0]) % 8}`, 0.45);
    }
    if (mode.name === 'sampler') return item.sampler[at] === null ? null : mixed('--rare', -item.sampler[at] / range);
    const policy = item.trainer || item.sampler;
    const value = mode.name === 'difference' ? difference(item, at)
      : policy[at] === null || item.reference[at] === null ? null : policy[at] - item.reference[at];
    if (value === null) return 'var(--odd)';
    return mixed(value < 0 ? '--less' : '--more', Math.abs(value) / range);
  }

  remarks(item) {
    const remarks = [];
    const gaps = differences(item);
    if (gaps) {
      remarks.push(`Trainer and sampler differ by ${figure(gaps.mean)} nats per token on average, ${minus(signed(gaps.largest, 3))} at most.`);
    } else if (item.pieces.length) {
      remarks.push('The trainer’s logprobs were not recorded for this sample.');
    }
    const left = item.numTokens - item.pieces.length;
    if (item.pieces.length && left > 0) remarks.push(`${left} more tokens are not in this page.`);
    return remarks.map((text) => make('p', { class: 'help', text }));
  }

  // ---- The numbers of one token ----------------------------------------------------------------------------------

  point(item, node) {
    const at = Number(node.dataset.at);
    const rows = [['token', `${at + 1} of ${item.numTokens}, id ${item.ids[at]}`]];
    const lookup = (name) => (item[name] && item[name][at] !== null && item[name][at] !== undefined ? item[name][at] : null);
    const told = (value) => `${minus(value.toFixed(4))}  (${(100 * Math.exp(value)).toFixed(2)}%)`;
    for (const name of ['sampler', 'trainer', 'reference']) {
      if (lookup(name) !== null) rows.push([name, told(lookup(name))]);
    }
    const gap = difference(item, at);
    if (gap !== null) rows.push(['difference', `${signed(gap, 4)}  (ratio ${Math.exp(gap).toFixed(3)})`]);
    const version = versionAt(item, at);
    if (version !== null) rows.push(['weights', `version ${minus(String(version))}`]);
    const shown = item.pieces[at] === '' ? 'part of the next character' : JSON.stringify(item.pieces[at]);
    this.tip.replaceChildren(
      make('div', { class: 'word', text: shown }),
      make('dl', {}, ...rows.flatMap(([name, value]) => [make('dt', { text: name }), make('dd', { text: value })])),
    );
    this.tip.hidden = false;
    this.place(node.getClientRects()[0] || node.getBoundingClientRect());
  }

  place(box) {
    const { offsetWidth, offsetHeight } = this.tip;
    const left = Math.min(Math.max(8, box.left), document.documentElement.clientWidth - offsetWidth - 8);
    const above = box.top - offsetHeight - 8;
    this.tip.style.left = `${left}px`;
    this.tip.style.top = `${above > 8 ? above : box.bottom + 8}px`;
  }

  hide() {
    this.tip.hidden = true;
  }
}
