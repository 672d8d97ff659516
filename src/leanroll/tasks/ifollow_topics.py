"""Topics and request forms of `ifollow`. No evaluation topic shares a content word with a training topic (tested)."""

from __future__ import annotations

TRAIN_TOPICS: tuple[str, ...] = tuple(
    topic.strip()
    for topic in """
    black holes; the moon; solar energy; wind turbines; ocean tides; coral reefs; volcanoes; earthquakes; glaciers;
    desert plants; rainforests; honeybees; butterflies; spiders; elephants; dolphins; penguins; wolves; owls; horses;
    house cats; guide dogs; goldfish; parrots; dinosaurs; fossils; magnets; electricity; gravity; thunderstorms;
    rainbows; snowflakes; the seasons; the water cycle; photosynthesis; vitamins; vaccines; the human heart; sleep;
    dreams; exercise; yoga; running; swimming; cycling; football; basketball; tennis; chess; board games;
    video games; movies; jazz music; the piano; the guitar; painting; photography; pottery; knitting; gardening;
    cooking pasta; baking bread; chocolate; coffee; green tea; cheese; honey; potatoes; tomatoes; apples;
    breakfast; school lunches; street food; farmers markets; supermarkets; recycling; plastic waste; public buses;
    trains; airplanes; bicycles; electric cars; bridges; skyscrapers; lighthouses; castles; museums; libraries;
    newspapers; radio; television; telephones; computers; robots; the internet; passwords; email; search engines;
    satellites; telescopes; microscopes; batteries; cameras; clocks; calendars; maps; money; taxes; saving for a house;
    small businesses; job interviews; teamwork; leadership; honesty; patience; friendship; family dinners; birthdays;
    weddings; holidays; camping; hiking; fishing; sailing; the beach; mountains; rivers; lakes; islands; caves;
    the pyramids; ancient Rome; the Vikings; samurai; pirates; knights; the printing press; the steam engine;
    democracy; elections; city parks; firefighters; nurses; teachers; farmers; astronauts; detectives; bakers;
    carpenters; umbrellas; shoes; hats; jeans; mirrors; candles; soap; pencils; notebooks; backpacks; bedtime stories;
    poetry; fairy tales; ghost towns; magic tricks; puppets; the circus; dancing; singing; laughter; homework; exams;
    learning a language; reading novels; handwriting; spelling; fractions; geometry; probability; prime numbers;
    moving to a new town; a rainy day; a broken window; a lost wallet; a surprise visit; a long journey; a quiet village
    """.replace("\n", " ").split(";")
)

EVAL_TOPICS: tuple[str, ...] = tuple(
    topic.strip()
    for topic in """
    comets; meteor showers; mangroves; hurricanes; kangaroos; octopuses; hummingbirds; tortoises; squirrels; sharks;
    mushrooms; cacti; orchids; bamboo; sourdough; olive oil; lemonade; popcorn; noodle soup; spicy curry;
    ice skating; surfing; volleyball; archery; marathons; karate; the violin; drums; opera; origami; sculpture;
    quilting; woodworking; escalators; submarines; helicopters; ferries; tunnels; temples; fountains; aquariums;
    theaters; podcasts; keyboards; drones; calculators; compasses; thermometers; insurance; budgeting; volunteering;
    courage; gratitude; kindness; graduation; picnics; roller coasters; sledding; geysers; canyons; the Aztecs;
    gladiators; the telegraph; judges; dentists; plumbers; tailoring; blankets; sunglasses; spoons; bookshelves;
    riddles; juggling; homesickness; stage fright; algebra; crossword puzzles; a power outage; a flat tire; a stray kitten
    """.replace("\n", " ").split(";")
)

REQUESTS: tuple[str, ...] = (
    "Write a short paragraph about {topic}.",
    "Tell me about {topic}.",
    "Explain {topic} to a beginner.",
    "Describe {topic} in your own words.",
    "Write something about {topic}.",
    "Share some thoughts on {topic}.",
    "What should people know about {topic}?",
    "Give a friend some advice on {topic}.",
    "Write a short blog post about {topic}.",
    "Write a short message to a friend about {topic}.",
    "Why do people care about {topic}?",
    "Write a very short story about {topic}.",
    "What is interesting about {topic}?",
    "Introduce {topic} to a new student.",
)

_FILLERS = frozenset({"the", "a", "an", "to", "for", "new"})


def topic_stems(topic: str) -> tuple[str, ...]:
    """Beginnings of the topic's content words; an answer that has none of them does not speak of the topic.

    Words keep at most five letters and lose a final s, so that inflected forms match.
    """
    content = [word for word in topic.lower().split() if word not in _FILLERS]
    return tuple(word.removesuffix("s")[:5] for word in content)
