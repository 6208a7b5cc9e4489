// How elements and numbers are made. Texts of a run only ever become text, never markup.

function make(tag, properties, ...children) {
  return furnish(document.createElement(tag), properties, children);
}

function draw(tag, properties, ...children) {
  return furnish(document.createElementNS('http://www.w3.org/2000/svg', tag), properties, children);
}

function furnish(node, properties, children) {
  for (const [name, value] of Object.entries(properties || {})) {
    if (name === 'on') {
      for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    } else if (name === 'text') {
      node.textContent = value;
    } else if (value !== null && value !== undefined && value !== false) {
      node.setAttribute(name, value === true ? '' : value);
    }
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function figure(value, unit) {
  if (value === null || value === undefined) return '–';
  if (unit === '%') return `${(100 * value).toFixed(1)}%`;
  const size = Math.abs(value);
  let text;
  if (size >= 1e6) text = `${(value / 1e6).toFixed(2)}M`;
  else if (size >= 1e4) text = Math.round(value).toLocaleString('en-US');
  else if (size !== 0 && size < 1e-3) text = value.toExponential(2).replace(/\.?0+e/, 'e');
  else text = String(Number(value.toPrecision(4)));
  return minus(text);
}

function minus(text) {
  return text.replace(/-/g, '−');
}

function signed(value, digits) {
  if (value === null || value === undefined) return '–';
  return (value > 0 ? '+' : '') + minus(value.toFixed(digits));
}

function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60)];
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

// As short as it can be said: 4:05 for minutes and seconds, 3 h, 2 d 4 h.
function span(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor((whole % 86400) / 3600), Math.floor((whole % 3600) / 60)];
  if (days) return hours ? `${days} d ${hours} h` : `${days} d`;
  if (hours) return minutes ? `${hours} h ${minutes} m` : `${hours} h`;
  if (minutes) return whole % 60 ? `${minutes}:${String(whole % 60).padStart(2, '0')} min` : `${minutes} min`;
  return `${whole} s`;
}

function moment(seconds) {
  const date = new Date(seconds * 1000);
  if (Number.isNaN(date.getTime())) return '–'; // a time that no calendar has
  return date.toISOString().replace('T', ' ').slice(0, 16) + ' UTC';
}

function isTyping(target) {
  return target instanceof Element && target.closest('input, select, textarea, [data-keys]') !== null;
}
