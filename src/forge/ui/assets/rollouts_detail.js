// One rollout beside the list: its facts, its group, its conversation or completion, and what the step made of it.

// Puts a sample as the server describes it into the form that the report has.
function adopt({ item, prompts, messages, gradient }, maskTruncated) {
  return Object.assign(item, { gradient, pool: { prompts, messages, maskTruncated } });
}

class RolloutDetail {
  constructor(view) {
    Object.assign(this, { view, limit: SHOWN_TOKENS, name: null });
    this.panel = new GradientPanel();
    this.tokens = new TokenView({ onPick: (item, at) => this.panel.pick(item, at) });
    this.position = make('output', { class: 'position', 'data-test': 'position' });
    this.node = make('article', { class: 'card detail', 'data-test': 'detail' }, make('p', { class: 'help', text: 'Loading …' }));
  }

  close() {
    this.tokens.close();
  }

  empty(found) {
    this.node.replaceChildren(make('p', { class: 'help', text: found.numRows ? 'Change the filters above to see a rollout.' : '' }));
  }

  async show(name, limit = SHOWN_TOKENS) {
    Object.assign(this, { name, limit });
    this.tokens.hide();
    let found;
    try {
      found = await this.view.sample(name, limit);
    } catch (error) {
      if (name === this.name) this.node.replaceChildren(make('p', { class: 'help', 'data-test': 'gone', text: error.message }));
      return;
    }
    if (name !== this.name || this.view.isClosed) return;
    this.found = found;
    this.render();
  }

  render() {
    const { found, view } = this;
    const item = adopt(found, found.maskTruncated);
    const completion = make('div', { class: 'completion' });
    const isAbreast = view.isAbreast && found.group.length > 1;
    this.node.replaceChildren(...[
      this.header(item),
      sampleFacts(item),
      this.siblings(found),
      ...questionNodes(item),
      make('h4', { text: isAbreast ? 'Group' : isEpisode(item) ? 'Conversation' : 'Completion' }),
      completion,
      this.moreButton(item),
      ...found.notes.filter((note) => isEpisode(item) || !note.startsWith('Of long completions')).map((text) => make('p', { class: 'help', text })),
      this.panel.node,
      ...earningNodes(item),
    ].filter((node) => node));
    this.panel.show(item, found.gradient, found.advantageFrom);
    if (isAbreast) this.showGroup(completion, found);
    else this.tokens.show(item, completion);
    this.renderPosition();
  }

  header(item) {
    const { view, found } = this;
    const kinds = { fruitless: 'before step', evaluation: 'evaluation after step', step: 'step' };
    const told = `${kinds[found.kind]} ${item.step.toLocaleString('en-US')} · group ${item.group} · sample ${item.index}`;
    const goTo = (query, text, title) => link(sampleLink(view.run, query), { class: 'hop', title, text });
    return make(
      'header', {},
      make('h3', { text: told[0].toUpperCase() + told.slice(1) }),
      make('div', { class: 'moves' }, view.button('←', () => view.move(-1), 'Previous rollout'), this.position, view.button('→', () => view.move(1), 'Next rollout')),
      make(
        'nav', { class: 'hops', 'aria-label': 'From this rollout' },
        link(placeOf(view.run, { at: item.step }), { class: 'hop', text: 'on the charts', title: 'Hold this step on the charts' }),
        goTo({ step: item.step, sample: found.name }, 'this step', 'All rollouts of this step'),
        goTo({ prompt: item.promptId, sort: 'oldest', sample: found.name }, 'this prompt', 'All answers to this prompt, over the whole run'),
        found.group.length > 1 ? this.abreastButton() : null,
      ),
    );
  }

  abreastButton() {
    return make('button', { type: 'button', class: 'switch', 'aria-pressed': String(this.view.isAbreast), text: 'group side by side', title: 'Key c', on: { click: () => this.toggleAbreast() } });
  }

  toggleAbreast() {
    const { view } = this;
    view.isAbreast = !view.isAbreast;
    keep({ side: view.isAbreast ? '1' : '' });
    if (this.found) this.render();
  }

  renderPosition() {
    const { found, place } = this.view;
    if (!found) return;
    this.position.textContent = place === null ? `– of ${found.numFound.toLocaleString('en-US')}` : `${(place + 1).toLocaleString('en-US')} of ${found.numFound.toLocaleString('en-US')}`;
  }

  siblings({ name, group }) {
    if (group.length < 2) return null;
    const range = group.map(({ reward }) => reward ?? 0).reduce(([low, high], reward) => [Math.min(low, reward), Math.max(high, reward)], [0, 0]);
    return make('div', { class: 'siblings', role: 'group', 'aria-label': 'Samples of this group' }, make('span', { class: 'help', text: 'This group:' }), ...group.map((other) => {
      const button = make('button', { type: 'button', 'aria-label': `Sample ${other.index}, reward ${figure(other.reward)}`, 'aria-current': other.name === name ? 'true' : null, on: { click: () => this.view.choose(other.name) } });
      button.append(rewardMeter(other.reward, range));
      return button;
    }));
  }

  moreButton(item) {
    const left = item.numTokens - item.pieces.length;
    if (left <= 0 || !item.pieces.length || this.limit >= MOST_TOKENS) return null;
    return make('button', { type: 'button', text: `show ${Math.min(left, 3 * this.limit).toLocaleString('en-US')} more tokens`, on: { click: () => this.show(this.name, Math.min(MOST_TOKENS, 4 * this.limit)) } });
  }

  // ---- The group side by side ------------------------------------------------------------------------------------

  async showGroup(box, { name }) {
    box.replaceChildren(make('p', { class: 'help', text: 'Loading the group …' }));
    let found;
    try {
      found = await ask('rollouts/group', { run: this.view.run, name });
    } catch (error) {
      box.replaceChildren(make('p', { class: 'help', text: error.message }));
      return;
    }
    if (name !== this.name || !box.isConnected) return;
    const items = found.members.map((member) => Object.assign(adopt(member, found.maskTruncated), { sampleName: member.name }));
    this.tokens.showAll(items, box, (item, body) => this.column(item, body, item.sampleName === name));
    if (found.numMembers > items.length) box.append(make('p', { class: 'help', text: `${found.numMembers - items.length} more members are not shown.` }));
    const own = box.querySelector('.column.own');
    if (own) own.parentElement.scrollLeft = own.offsetLeft - own.parentElement.offsetLeft;
  }

  column(item, body, isOwn) {
    const head = make(
      'header', {},
      make('button', { type: 'button', class: 'switch', text: `sample ${item.index}`, 'aria-pressed': String(isOwn), on: { click: () => this.view.choose(item.sampleName) } }),
      make('dl', { class: 'marks' }, ...[['reward', figure(item.reward), 'main'], ['advantage', signed(item.advantage, 3), item.advantage > 0 ? 'up' : item.advantage < 0 ? 'down' : ''], ['tokens', item.numTokens.toLocaleString('en-US'), '']].map(([label, value, kind]) => make('div', { class: kind }, make('dt', { text: label }), make('dd', { text: value })))),
    );
    const left = item.numTokens - item.pieces.length;
    return make('section', { class: `column${isOwn ? ' own' : ''}` }, head, body, left > 0 && item.pieces.length ? make('p', { class: 'help', text: `${left.toLocaleString('en-US')} more tokens` }) : null);
  }
}
