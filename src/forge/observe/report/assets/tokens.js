// The tokens of samples, coloured by what is asked for, each with its numbers under the pointer or the cursor.

class TokenView {
  // `onPick(item, at)` hears of a token that is chosen by a click or the keyboard; it returns whether it shows it.
  constructor({ onPick = null } = {}) {
    this.mode = 'difference';
    this.onPick = onPick;
    this.ranges = new Map(MODES.filter(({ ranges }) => ranges).map((mode) => [mode.name, mode.ranges[Math.min(2, mode.ranges.length - 1)]]));
    this.ranges.set('gradient', 1);
    this.tip = make('div', { class: 'tip', role: 'status', hidden: true });
    document.body.append(this.tip);
    this.onScroll = () => this.hide();
    document.addEventListener('scroll', this.onScroll, { passive: true, capture: true });
  }

  close() {
    this.tip.remove();
    document.removeEventListener('scroll', this.onScroll, { capture: true });
  }

  show(item, box) {
    this.fill(box, [item], (mode) => [this.body(item, mode), ...this.remarks(item)]);
  }

  // Shows several samples with the same colours; `frame(item, body)` surrounds the tokens of each.
  showAll(items, box, frame) {
    this.fill(box, items, (mode) => [make('div', { class: 'abreast', 'data-test': 'abreast' }, ...items.map((item) => frame(item, this.body(item, mode))))]);
  }

  fill(box, items, content) {
    const usable = MODES.filter((mode) => items.some((item) => mode.has(item)));
    const mode = usable.find(({ name }) => name === this.mode) || usable[0] || null;
    this.groups = mode && !mode.ranges ? groupsOf(mode, items) : [];
    box.replaceChildren(this.controls(usable, mode, () => this.fill(box, items, content)), ...content(mode));
    this.hide();
  }

  body(item, mode) {
    return isEpisode(item) ? new Conversation(item, (_, turn) => this.text(item, mode, turn)).node : this.text(item, mode, null);
  }

  controls(usable, mode, again) {
    const bar = make('div', { class: 'tokenbar' });
    if (!mode) return bar;
    const modes = make('select', { 'aria-label': 'Colour of tokens' });
    usable.forEach(({ name, label }) => modes.append(make('option', { value: name, text: label, selected: name === mode.name })));
    modes.addEventListener('change', () => { this.mode = modes.value; again(); });
    bar.append(make('label', {}, 'Colour: ', modes));
    if (!mode.ranges) {
      bar.append(make('span', { class: 'scale' }, ...this.groups.map(({ label, tone }) => make('span', { class: `version tone${tone}`, text: label }))));
      return bar;
    }
    const range = this.ranges.get(mode.name);
    const unit = mode.unit ?? ' nats';
    const ranges = make('select', { 'aria-label': mode.unit === undefined ? 'Range of the colours, in nats' : 'Range of the colours' });
    mode.ranges.forEach((value) => ranges.append(make('option', { value, text: `${mode.isOneSided ? 'to −' : '±'}${value}`, selected: value === range })));
    ranges.addEventListener('change', () => { this.ranges.set(mode.name, Number(ranges.value)); again(); });
    const [low, high] = mode.ends || ['less likely', 'more likely'];
    const ends = mode.isOneSided ? ['certain', `−${range}${unit}`] : [`−${range} ${low}`, `${high} +${range}`];
    bar.append(
      make('label', {}, 'Range: ', ranges),
      make('span', { class: 'scale' }, make('span', { text: ends[0] }), make('i', { class: mode.isOneSided ? 'ramp one' : 'ramp two' }), make('span', { text: ends[1] })),
    );
    return bar;
  }

  // The tokens of one turn, or of the whole sample.
  text(item, mode, turn) {
    const body = make('div', { class: 'tokens', 'data-test': 'tokens' });
    if (!item.pieces.length || (turn && turn.start === turn.end)) {
      body.append((turn ? turn.text : item.text) || '');
      return body;
    }
    for (const [name, value] of Object.entries({ tabindex: 0, 'data-keys': true, role: 'group', 'aria-label': 'Tokens. The arrow keys move from one to the next.' })) body.setAttribute(name, value);
    const from = turn ? turn.start : 0;
    const shown = item.pieces.slice(from, turn ? turn.end : undefined);
    shown.forEach((piece, place) => body.append(this.token(item, mode, piece, from + place)));
    if (turn && shown.length < turn.end - turn.start) body.append(make('small', { text: ` … ${turn.end - turn.start - shown.length} more tokens` }));
    const find = (event) => (event.target instanceof Element ? event.target.closest('.token') : null);
    body.addEventListener('pointerover', (event) => { const node = find(event); if (node) this.point(item, node); });
    body.addEventListener('click', (event) => { const node = find(event); if (node) this.pick(item, node); });
    body.addEventListener('pointerleave', () => this.hide());
    body.addEventListener('keydown', (event) => this.key(event, item, body));
    body.addEventListener('blur', () => this.hide());
    return body;
  }

  token(item, mode, piece, at) {
    const node = make('span', { class: piece === '' ? 'token hollow' : 'token', 'data-at': at });
    piece.split('\n').forEach((line, place) => {
      if (place > 0) node.append(make('span', { class: 'newline', text: '↵' }), '\n');
      node.append(line);
    });
    const colour = mode && mode.has(item) ? this.colour(item, mode, at) : null;
    if (colour) node.style.backgroundColor = colour;
    return node;
  }

  colour(item, mode, at) {
    const mixed = (name, part) => `color-mix(in srgb, var(${name}) ${Math.round(85 * Math.min(1, part))}%, transparent)`;
    if (!mode.ranges) {
      const found = this.groups.find(({ name }) => name === mode.group(item, at));
      return found ? mixed(`--tone${found.tone}`, 0.45) : null;
    }
    const range = this.ranges.get(mode.name);
    const value = mode.value(item, at);
    const turn = value === null ? turnAt(item, at) : null;
    if (value === null) return turn && leftOut(item, turn) ? null : 'var(--odd)';
    if (mode.isOneSided) return mixed('--rare', -value / range);
    return mixed(value < 0 ? '--less' : '--more', Math.abs(value) / range);
  }

  remarks(item) {
    const remarks = [];
    const gaps = differences(item);
    if (gaps) {
      remarks.push(`Trainer and sampler differ by ${figure(gaps.mean)} nats per token on average, ${minus(signed(gaps.largest, 3))} at most.`);
    } else if (item.pieces.length && item.outcome === 'trained') {
      remarks.push('The trainer’s logprobs were not recorded for this sample.');
    }
    const left = item.numTokens - item.pieces.length;
    if (item.pieces.length && left > 0) remarks.push(`${left} more tokens are not in this page.`);
    return remarks.map((text) => make('p', { class: 'help', text }));
  }

  // ---- The numbers of one token ----------------------------------------------------------------------------------

  // Moves from token to token. The keys of the page do something else.
  key(event, item, body) {
    const moves = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    if (event.key === 'Escape') this.hide();
    if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const all = [...body.querySelectorAll('.token')];
    const at = all.findIndex((node) => node.classList.contains('picked'));
    const next = all[Math.min(all.length - 1, Math.max(0, at + moves[event.key]))];
    next.scrollIntoView({ block: 'nearest' });
    this.pick(item, next);
  }

  pick(item, node) {
    document.querySelectorAll('.token.picked').forEach((other) => other.classList.remove('picked'));
    node.classList.add('picked');
    if (this.onPick?.(item, Number(node.dataset.at))) this.hide();
    else this.point(item, node);
  }

  point(item, node) {
    const at = Number(node.dataset.at);
    const rows = [['token', `${at + 1} of ${item.numTokens}, id ${item.ids[at]}`]];
    const told = (value) => `${minus(value.toFixed(4))}  (${(100 * Math.exp(value)).toFixed(2)}%)`;
    for (const name of ['sampler', 'trainer', 'reference', 'teacher']) {
      const value = item[name]?.[at] ?? null;
      if (value !== null) rows.push([name, told(value)]);
    }
    const apart = difference(item, at);
    if (apart !== null) rows.push(['difference', `${signed(apart, 4)}  (ratio ${Math.exp(apart).toFixed(3)})`]);
    const version = versionAt(item, at);
    if (version !== null) rows.push(['weights', `version ${minus(String(version))}`]);
    if (item.outcome === 'trained' && advantageAt(item, at) !== null) rows.push(['advantage', signed(advantageAt(item, at), 4)]);
    if (learned(item, 'gradient', at) !== null) rows.push(['gradient', figure(learned(item, 'gradient', at))]);
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
